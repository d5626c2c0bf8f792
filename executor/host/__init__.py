"""Calls on the host under resource limits: ``python_tools = "limits"``."""
