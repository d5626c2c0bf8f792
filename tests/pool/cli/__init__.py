"""Tests of pool/cli."""
