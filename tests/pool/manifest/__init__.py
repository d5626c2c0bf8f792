"""Tests of pool/manifest."""
