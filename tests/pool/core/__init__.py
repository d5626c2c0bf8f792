"""Tests of pool/core."""
