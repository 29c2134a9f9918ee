"""Decisions of a worker: sequences, block books, batches. Pure: no clock, no I/O, no torch."""
