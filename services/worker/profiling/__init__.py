"""Measures what batches, links and memory cost on this machine, with the parts that serve."""
