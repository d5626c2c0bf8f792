"""Tests of executor/staging."""
