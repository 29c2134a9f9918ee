"""Replaying load and measuring it."""
