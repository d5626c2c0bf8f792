"""Tests of pool/ledger."""
