"""Decisions as functions over snapshots of plain numbers."""
