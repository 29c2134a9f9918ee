"""Choices of a worker as functions over plain data: which tokens run next, who is preempted."""
