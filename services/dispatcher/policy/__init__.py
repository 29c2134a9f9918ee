"""Decisions of a dispatcher as functions over snapshots of plain numbers."""
