"""Decides who is there: pure, no clock, no I/O."""
