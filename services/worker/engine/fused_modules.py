"""Modules of `transformers` that the compiled kernels compute on CPUs: linear modules, RMS norms, rotary embeddings and
experts.

Families share code by copying it, so norms and rotary embeddings are recognised by the bytecode of their functions.
"""

from collections.abc import Callable, Container
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, rotate_half

from services.worker.engine.native.library import Kernels

_ROTATE = "apply_rotary_pos_emb"
_Forward = Callable[..., Any]


def fuse(model: nn.Module, packed: Container[str], kernels: Kernels, active: Callable[[], bool]) -> None:
    """Let the kernels compute modules of known kinds, whenever `active()` is true. `packed`: parameters that stay
    quantised.
    """
    rotating: dict[type, FunctionType] = {}
    for name, module in model.named_modules():
        kind = type(module)
        forward: Any = kind.forward  # Any: a function of a class that is not known here
        if kind is nn.Linear and f"{name}.weight" not in packed:
            module.forward = _product(module, module.forward, kernels, active)
        elif _same(forward, LlamaRMSNorm.forward):
            module.forward = _norm(module, module.forward, kernels, active)
        elif _rotates(forward):
            if kind not in rotating:
                rotating[kind] = _with_rotation(forward, kernels, active)
            module.forward = MethodType(rotating[kind], module)


def experts(
    kernels: Kernels, module: Any, hidden_TD: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`transformers`' `ExpertsInterface`: one kernel call computes the experts of a layer. Those that are not gated by
    SiLU, or are stored transposed, are multiplied by `transformers`.
    """
    matrices = (module.gate_up_proj, module.down_proj) if module.has_gate else ()
    known = (
        type(module)._apply_gate is _default_apply_gate
        and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
        and not (module.is_transposed or module.has_post_expert_norm or module._is_expert_parallel)
    )
    if not (matrices and known and all(m.dtype == hidden_TD.dtype and m.is_contiguous() for m in matrices)):
        return grouped_mm_experts_forward(module, hidden_TD, top_k_index, top_k_weights)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    gate_up, down = zip(matrices, biases, strict=True)
    return kernels.experts(hidden_TD, top_k_index, top_k_weights, gate_up, down)


def _product(module: Any, by_torch: _Forward, kernels: Kernels, active: Callable[[], bool]) -> _Forward:
    def product(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if not active() or x.dtype != weight.dtype or not weight.is_contiguous():
            return by_torch(x)
        return kernels.products(x.reshape(-1, x.shape[-1]), weight, module.bias).view(*x.shape[:-1], -1)

    return product


def _norm(module: Any, by_torch: _Forward, kernels: Kernels, active: Callable[[], bool]) -> _Forward:
    def norm(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if not active() or x.dtype != weight.dtype or x.stride(-1) != 1:
            return by_torch(x)
        rows = x.reshape(-1, x.shape[-1])
        return kernels.rms_norm(rows, weight, rows.new_empty(rows.shape), module.variance_epsilon).view(x.shape)

    return norm


def _with_rotation(forward: FunctionType, kernels: Kernels, active: Callable[[], bool]) -> FunctionType:
    """Return a copy of `forward` that rotates with the kernel instead of its module's `apply_rotary_pos_emb`."""
    by_torch = forward.__globals__[_ROTATE]

    def rotate(
        q_1NTH: torch.Tensor, k_1KTH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, ...]:
        one = cos.dim() == 3 and len(cos) == len(q_1NTH) == unsqueeze_dim == 1
        if not (active() and one and q_1NTH.shape[2:] == cos.shape[1:] and q_1NTH.dtype == k_1KTH.dtype == cos.dtype):
            return by_torch(q_1NTH, k_1KTH, cos, sin, unsqueeze_dim)
        return tuple(
            kernels.rotated(heads[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None]
            for heads in (q_1NTH, k_1KTH)
        )

    names = forward.__globals__ | {_ROTATE: rotate}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _rotates(forward: Any) -> bool:
    if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
        return False
    function: Any = forward.__globals__.get(_ROTATE)
    return _same(function, apply_rotary_pos_emb) and _same(function.__globals__.get("rotate_half"), rotate_half)


def _same(function: Any, known: Any) -> bool:
    both = isinstance(function, FunctionType) and isinstance(known, FunctionType)
    return both and _essence(function.__code__) == _essence(known.__code__)


def _essence(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(constant for constant in code.co_consts if not isinstance(constant, str))  # docstrings differ
    return code.co_code, code.co_names, code.co_varnames, code.co_argcount, constants
