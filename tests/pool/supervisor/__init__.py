"""Tests of pool/supervisor."""
