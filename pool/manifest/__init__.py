"""Manifests: which agents there are, and which tools each has."""
