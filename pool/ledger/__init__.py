"""A pool's state directory: its identity, its lock, its entries, and their clean-up."""
