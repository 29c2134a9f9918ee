"""Liveness and load of instances: pure, no clock, no I/O."""
