"""Ballast: LLM serving that drops parameters instead of queueing."""

__version__ = "0.1.0"
