"""Tests of pool/doctor."""
