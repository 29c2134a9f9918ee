"""Executes batches: models, attention, sampling, checkpoint loading. Uses torch; requests are unknown here."""
