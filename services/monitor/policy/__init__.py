"""Decides from plain numbers whether memory will be short or has become idle: pure, no clock, no I/O."""
