"""The supervisor: carries out what the core decides, and feeds the core what happened."""
