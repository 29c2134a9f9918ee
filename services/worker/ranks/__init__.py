"""Tensor-parallel instances: rank 0 is the worker, and owns the processes of the others.

Each rank has its share of the heads and of the MLP, and the whole embedding and head. A step is sent to all ranks,
all-reduces follow attention's output projection and the MLP's down projection, and rank 0 samples. Memory budgets are
per rank; reports are sums. Only rank 0 has links: otherwise every rank would execute each transfer decision, over the
same network.
"""
