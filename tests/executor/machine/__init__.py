"""Tests of executor/machine."""
