"""Carries out what the core decides, and tells the core what happened."""
