"""The tests, one file for each thing that they test."""
