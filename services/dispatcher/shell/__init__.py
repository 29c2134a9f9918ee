"""Executes commands as I/O; results become events."""
