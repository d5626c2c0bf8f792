"""Tests of executor/engine."""
