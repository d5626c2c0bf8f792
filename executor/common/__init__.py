"""Helpers of the whole package: logging, safe printing, threads, event loops, processes."""
