"""Decides from plain numbers whether memory is short or idle. Pure: no clock, no I/O."""
