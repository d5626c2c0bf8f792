"""Tests of executor/sandbox."""
