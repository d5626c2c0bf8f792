"""One hardened container: its profile, its start and verification, its calls and its end."""
