"""The command ``emberpool``."""
