"""Discrete-event cluster around the real cores."""
