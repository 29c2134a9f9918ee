"""Executes batches: models, attention, sampling, checkpoint loading. Knows torch, knows nothing of requests."""
