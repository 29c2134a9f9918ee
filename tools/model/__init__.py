"""Small random checkpoints for tests, demos and benchmarks."""
