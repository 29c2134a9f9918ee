"""Executes the commands of the planner's core."""
