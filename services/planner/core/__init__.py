"""Decides the layout: pure, no clock, no I/O."""
