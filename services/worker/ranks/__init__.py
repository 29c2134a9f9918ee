"""Tensor-parallel instances: rank 0 is the worker, and owns the processes of the others."""
