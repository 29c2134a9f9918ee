"""Executes batches: models, attention, sampling, checkpoint loading. Uses torch; has no notion of requests."""
