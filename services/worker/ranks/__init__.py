"""Tensor-parallel instances: rank 0 is the worker, and owns the processes of the others.

Each rank has its share of the heads and of the MLP, and all of embedding and head. A step is sent to all, sums over the
ranks stand behind the second products of attention and MLP, and rank 0 samples. A budget is each rank's own; the
cluster hears sums. Only rank 0 has links: with links of their own the ranks would carry out each decision about a
transfer once each, over the same network.
"""
