"""Decides the cluster's layout. Pure: no clock, no I/O."""
