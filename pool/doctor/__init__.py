"""The doctor and the launch check: what stands between a configuration and a working pool."""
