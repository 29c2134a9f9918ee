"""Helpers for building the images."""
