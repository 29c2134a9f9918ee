"""Decisions of the jobs service, as pure functions and state machines: no clock, no I/O."""
