"""A worker without a model: real control plane, memory without contents, durations from a profile. Does not import
torch.
"""
