"""Tests against a real container engine."""
