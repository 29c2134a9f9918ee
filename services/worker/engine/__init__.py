"""Executes batches: models, attention, sampling, checkpoint loading. Uses torch; knows sequences, not requests."""
