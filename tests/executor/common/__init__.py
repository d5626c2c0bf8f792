"""Tests of executor/common."""
