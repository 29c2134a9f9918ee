"""Rotary position embedding: tables of cosines and sines, bit-identical to those of `transformers`.

As in `transformers`, they are computed in float32 whatever the model's dtype, and then converted.
"""

import math

import torch

from services.worker.engine.model_config import RopeConfig, RopeKind


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3 scaling: long wavelengths are stretched by the factor, short ones kept, and those in between
    interpolated.
    """
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > shortest_stretched, plain / rope.factor, plain)
    share_kept = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share_kept) * stretched / rope.factor + share_kept * stretched
    between = ~(wavelengths < longest_kept) & ~(wavelengths > shortest_stretched)
    return torch.where(between, blended, stretched)


def rotary_table(
    rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[positions, 2, head_dim]: cosines and sines that rotate a head at each position.

    The first half of the sines is negated, so that rotating is `x * cos + swap_halves(x) * sin`.
    """
    angles = torch.arange(positions).float()[:, None] * inverse_frequencies(rope, head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(device=device, dtype=dtype)
