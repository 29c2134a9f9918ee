"""Decides from plain numbers whether memory is short or idle: pure, no clock, no I/O."""
