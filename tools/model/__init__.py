"""Makes small random checkpoints for tests, demos and benchmarks, and reads facts about any checkpoint."""
