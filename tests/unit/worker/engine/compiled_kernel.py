"""Compiles Triton kernels ahead of time for GPUs that this machine lacks, and returns the resources that they need."""

import contextlib
import importlib
import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_LIMIT_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # by capability: limit for one program
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Compiled:
    shared_bytes: int
    spilled_bytes: int  # spilled from registers to memory
    registers: int  # per thread
    ptx: str
    cubin: bytes

    @property
    def loop_instructions(self) -> int:
        """Instructions of each thread in the shortest loop that multiplies matrices."""
        tool = (
            Path(importlib.import_module("triton").__file__ or "").parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            told = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout
        found: list[str] = []
        labels: dict[str, int] = {}
        lengths: list[int] = []
        for line in told.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(found)
            if instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                found.append(instruction[1])
                back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
                body = found[labels[back[1]] :] if back and back[1] in labels else []
                if any(re.search(r"MMA\b", each) for each in body):
                    lengths.append(len(body))
        return min(lengths)


def compiled(kernel: Any, given: Mapping[str, str], constants: Mapping[str, Any], capability: int) -> Compiled:
    """Compiles as the just-in-time compiler would for aligned arguments. `given`: types of the arguments."""
    triton: Any = importlib.import_module("triton")
    names = kernel.arg_names
    aligned = [names.index(name) for name in given if name.endswith(("_ptr", "_stride", "vocabulary"))]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: given.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    options = {name: value for name, value in constants.items() if name not in names}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
        done = triton.compile(source, target=target, options=options)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said.getvalue())
    registers = re.findall(r"Used (\d+) registers", said.getvalue())
    assert spills, said.getvalue()
    return Compiled(done.metadata.shared, sum(map(int, spills)), int(registers[0]), done.asm["ptx"], done.asm["cubin"])


def signatures(dtype: torch.dtype) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Argument types of the kernels between matrix products: norm, rotation and activation."""
    kind = f"*{TYPES[dtype]}"
    norm = {"out_ptr": kind, "hidden_ptr": kind, "added_ptr": kind, "weight_ptr": kind}
    norm |= {"hidden_row_stride": "i32", "added_row_stride": "i32", "eps": "fp32"}
    rotation = dict.fromkeys(("qkv_ptr", "kv_ptr", "rotary_ptr", "query_norm_ptr", "key_norm_ptr"), kind)
    rotation |= {"positions_ptr": "*i64", "k_rows_ptr": "*i64", "row_stride": "i32", "eps": "fp32", "base_block": "i32"}
    return norm, rotation, {"gate_up_ptr": kind, "row_stride": "i32"}
