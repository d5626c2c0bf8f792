"""A session's tool directories: found, copied to where the sandbox sees them, and kept by content."""
