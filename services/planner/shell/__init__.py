"""Carries out what the planner's core decides."""
