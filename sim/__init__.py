"""Discrete-event simulation of a cluster, with the real cores."""
