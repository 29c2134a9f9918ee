"""FlashInfer's wrappers for the CPU. They have the signatures of 0.7.2, and compute attention as its documentation
defines it, only from the arguments of `plan` and `run`.
"""

import inspect
from typing import Any

import torch

VERSION = "0.7.2.post1"
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"

# As `inspect.signature` prints them, without annotations. The decode wrapper's `plan` passes on to `_plan_impl`.
SIGNATURES = {
    (DECODE, "__init__"): (
        "(self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False,"
        " paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,"
        " backend='auto', jit_args=None)"
    ),
    (DECODE, "_plan_impl"): (
        "(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,"
        " pos_encoding_mode='NONE', window_left=-1, window_right=0, logits_soft_cap=None, q_data_type='float16',"
        " kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,"
        " non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,"
        " q_len_per_req=1, is_causal=None)"
    ),
    (DECODE, "run"): (
        "(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,"
        " return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,"
        " skip_softmax_threshold_scale_factor=None, kv_cache_sf=None)"
    ),
    (PREFILL, "__init__"): (
        "(self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None,"
        " paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,"
        " mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask=False)"
    ),
    (PREFILL, "plan"): (
        "(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,"
        " head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,"
        " pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,"
        " rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None,"
        " non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,"
        " max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,"
        " max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None)"
    ),
    (PREFILL, "run"): (
        "(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,"
        " return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, window_left=None, sinks=None,"
        " kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None)"
    ),
}


def printed(function: Any) -> str:
    """A function's signature in the form of `SIGNATURES`."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def bound(wrapper: str, method: str, *given: Any, **named: Any) -> dict[str, Any]:
    """The arguments by parameter name, defaults included. Raises TypeError if FlashInfer would not accept the call."""
    signature = inspect.signature(eval(f"lambda {SIGNATURES[wrapper, method][1:-1]}: None"))
    call = signature.bind(None, *given, **named)
    call.apply_defaults()
    return call.arguments


class FakeFlashInfer:
    """Replaces the module. `calls`: the plans and runs, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *given: Any, **named: Any) -> "FakeWrapper":
        return FakeWrapper(DECODE, self.calls, bound(DECODE, "__init__", *given, **named))

    def BatchPrefillWithPagedKVCacheWrapper(self, *given: Any, **named: Any) -> "FakeWrapper":
        return FakeWrapper(PREFILL, self.calls, bound(PREFILL, "__init__", *given, **named))


class FakeWrapper:
    def __init__(self, name: str, calls: list[str], made: dict[str, Any]) -> None:
        assert made["kv_layout"] == "NHD"
        assert not made["use_cuda_graph"]
        assert (made["float_workspace_buffer"].dtype, made["backend"]) == (torch.uint8, "fa2")
        assert made.get("use_tensor_cores", True)  # without them, some ratios of heads are refused
        self._name = name
        self._calls = calls
        self._plan: dict[str, Any] = {}

    def plan(self, *given: Any, **named: Any) -> None:
        self._calls.append(f"plan {self._name}")
        is_decode = self._name == DECODE
        told = bound(self._name, "_plan_impl" if is_decode else "plan", *given, **named)
        names = ("indptr", "indices", "last_page_len") if is_decode else _PAGES
        starts, pages, last_tokens = (told[name] for name in names)
        rows = torch.arange(len(last_tokens) + 1) if is_decode else told["qo_indptr"]
        for each in (starts, pages, last_tokens) + (() if is_decode else (rows,)):
            assert each.dtype == torch.int32
        assert len(starts) == len(rows) == len(last_tokens) + 1
        assert int(starts[-1]) == len(pages)
        assert int(last_tokens.min()) >= 1
        assert int(last_tokens.max()) <= told["page_size"]
        self._plan = told | {"rows": rows.tolist(), "starts": starts.tolist(), "pages": pages, "last": last_tokens}

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        self._calls.append(f"run {self._name}")
        told, plan = bound(self._name, "run", *given, **named), self._plan
        q, cache, out = told["q"], told["paged_kv_cache"], told["out"]
        head_dim = plan["head_dim"] if self._name == DECODE else plan["head_dim_qk"]
        assert q.shape == out.shape == (plan["rows"][-1], plan["num_qo_heads"], head_dim)
        assert cache.shape[1:] == (2, plan["page_size"], plan["num_kv_heads"], head_dim)
        assert q.dtype == out.dtype == plan["q_data_type"]
        assert cache.dtype == plan["kv_data_type"]
        assert out.is_contiguous()  # kernels take the strides of queries and pages, but not of the output
        assert q.stride()[1:] == (head_dim, 1)
        groups = plan["num_qo_heads"] // plan["num_kv_heads"]
        for at, last in enumerate(plan["last"].tolist()):
            first_row, end_row = plan["rows"][at : at + 2]
            pages = plan["pages"][plan["starts"][at] : plan["starts"][at + 1]].long()
            context = (len(pages) - 1) * plan["page_size"] + last
            kv = cache[pages].float().transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(groups, 2)
            scores = torch.einsum("qnh,cnh->nqc", q[first_row:end_row].float(), kv[0]) * plan["sm_scale"]
            if plan.get("causal"):  # the last query sees the whole context
                seen = (
                    torch.arange(context)
                    <= (torch.arange(end_row - first_row) + context - end_row + first_row)[:, None]
                )
                scores = scores.masked_fill(~seen, float("-inf"))
            out[first_row:end_row] = torch.einsum("nqc,cnh->qnh", scores.softmax(-1), kv[1]).to(out.dtype)
        return out


_PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
