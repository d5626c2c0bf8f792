"""Tests of executor."""
