"""Tests of pool/config."""
