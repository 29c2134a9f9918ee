"""Ballast: LLM serving that drops parameters instead of queueing."""
