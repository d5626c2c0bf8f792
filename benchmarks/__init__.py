"""What emberpool costs and what it saves, measured on a real engine: ``python -m benchmarks.latency``."""
