"""Decisions of the jobs service: no clock, no I/O."""
