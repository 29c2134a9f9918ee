"""Decisions over plain snapshots: which instances form groups."""
