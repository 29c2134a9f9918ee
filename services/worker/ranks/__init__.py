"""Tensor-parallel instances: rank 0 is the worker, and owns the processes of the other ranks.

Each rank has its share of the attention heads and of the MLP, and the whole embedding and output head. A step is sent
to all ranks, all-reduces follow attention's output projection and the MLP's down projection, and rank 0 samples. Memory
budgets are per rank; reports are sums. Only rank 0 has links, because otherwise every rank would have to execute each
transfer decision, over the same network.
"""
