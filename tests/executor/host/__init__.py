"""Tests of executor/host."""
