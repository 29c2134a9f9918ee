"""Decisions over plain snapshots: which instances form which groups."""
