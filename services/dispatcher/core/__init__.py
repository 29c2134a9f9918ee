"""Decisions of the dispatcher: events in, commands out. No await, clock, randomness or I/O."""
