"""Executes the core's commands as I/O and returns the results as events."""
