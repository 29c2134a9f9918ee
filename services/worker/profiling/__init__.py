"""Measures the cost of batches, links and memory operations on this machine, with the serving code."""
