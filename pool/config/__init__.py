"""The configuration: its tables, where it is read from, and what is wrong with it."""
