"""One hardened container at a time: profile, engine, cold calls, sandboxes. Knows nothing of pools or sessions."""
