"""Structs passed to the shared object; mirrors `src/abi.h`, which documents the fields."""

import ctypes
from typing import ClassVar

ABI = 6
PANEL = 32  # outputs per panel of a packed matrix

_Fields = list[tuple[str, type]]


def _numbers(names: str) -> _Fields:
    return [(name, ctypes.c_int64) for name in names.split()]


def _pointers(names: str) -> _Fields:
    return [(name, ctypes.c_void_p) for name in names.split()]


class Layer(ctypes.Structure):
    _fields_: ClassVar = _pointers(
        "kv attention_norm qkv qkv_bias query_norm key_norm output output_bias"
        " mlp_norm gate_up gate_up_bias down down_bias"
    )


class Model(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype kv_dtype hidden heads kv_heads head_dim inner block_tokens"),
        ("eps", ctypes.c_double),
        *_pointers("rotary layers"),
    ]


class Spans(ctypes.Structure):
    _fields_: ClassVar = [*_numbers("count"), *_pointers("spans blocks")]


SPAN_FIELDS = ("first_row", "row_count", "first_token", "end_token", "grows", "first_block")


class Step(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("rows"),
        *_pointers("hidden positions slots"),
        ("spans", Spans),
        *_pointers("normed qkv attended gate_up"),
    ]


class Attention(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype kv_dtype heads kv_heads head_dim block_tokens"),
        *_pointers("kv q"),
        *_numbers("q_stride"),
        *_pointers("out"),
        *_numbers("out_stride"),
        ("spans", Spans),
    ]


class Grouped(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype"),
        *_pointers("a"),
        *_numbers("a_stride"),
        *_pointers("matrices out"),
        *_numbers("outputs inputs"),
        *_pointers("bias"),
        *_numbers("groups"),
        *_pointers("ends"),
    ]


class GatedExperts(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype rows hidden inner experts each"),
        *_pointers("a"),
        *_numbers("a_stride"),
        *_pointers("chosen weights gate_up gate_up_bias down down_bias out places sorted between"),
    ]


class Rotation(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype rows heads head_dim"),
        *_pointers("x"),
        *_numbers("row_stride head_stride"),
        *_pointers("cosines sines out"),
    ]


class Sampling(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype"),
        *_pointers("logits"),
        *_numbers("stride rows vocabulary"),
        *_pointers("temperatures top_k top_p min_p uniforms chosen"),
    ]


class Gemm(ctypes.Structure):
    _fields_: ClassVar = [
        *_numbers("dtype"),
        *_pointers("a"),
        *_numbers("a_stride"),
        *_pointers("packed out"),
        *_numbers("out_stride rows outputs inputs"),
        *_pointers("bias"),
        *_numbers("add wide"),
    ]
