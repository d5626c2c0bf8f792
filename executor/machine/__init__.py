"""A fresh machine: a private engine, its packages, the image."""
