"""Compares the compiled kernels with their definition, for every instruction set of this processor."""

from collections.abc import Iterator

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from services.worker.engine.kv_dtype import FP8, converted
from services.worker.engine.native.library import Kernels, native_kernels, packed_shape
from tests.support.engine import NEEDS_NATIVE

pytestmark = [NEEDS_NATIVE]

KERNELS = native_kernels()
ISAS = KERNELS.isas if KERNELS else ("none",)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# Rows, inputs, outputs; some tiles, panels and vectors are partial.
SHAPES = [(1, 64, 64), (3, 48, 100), (17, 176, 352), (200, 700, 70), (64, 2048, 96), (513, 34, 33)]


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    assert KERNELS is not None
    best = KERNELS.isa
    KERNELS.choose_isa(request.param)
    yield KERNELS
    KERNELS.choose_isa(best)


def packed(kernels: Kernels, matrix: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(packed_shape(matrix.shape, matrix.dtype), dtype=matrix.dtype)
    kernels.pack(result, 0, matrix)
    return result


def padded(bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([bias, bias.new_zeros(-len(bias) % 32)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_in_bands_is_reversible(kernels: Kernels, dtype: torch.dtype) -> None:
    matrix = torch.randn(145, 22).to(dtype)
    bands = torch.zeros(packed_shape((145, 22), dtype), dtype=dtype)
    for first, last in ((70, 145), (0, 3), (3, 35), (35, 70)):
        kernels.pack(bands, first, matrix[first:last])
    assert torch.equal(bands, packed(kernels, matrix))
    assert torch.equal(kernels.unpack(bands, torch.arange(145), 22), matrix)
    chosen = torch.tensor([144, 0, 33, 33])
    assert torch.equal(kernels.unpack(bands, chosen, 22), matrix[chosen])
    panel, lane = 70 // 32, 70 % 32
    stored = bands[panel, :, lane] if dtype != torch.bfloat16 else bands[panel, :, lane].reshape(-1)
    assert torch.equal(stored, matrix[70])  # workers rely on this layout, which is the same on all processors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_its_definition(kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    rows, inputs, outputs = shape
    matrix, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    wide = torch.randn(rows, inputs + 3).to(dtype)
    x = wide[:, :inputs]  # rows with a stride
    exact = x.double() @ matrix.double().T
    size = (x.double().abs() @ matrix.double().abs().T).max()
    eps = torch.finfo(dtype).eps if dtype != torch.bfloat16 else torch.finfo(torch.float32).eps * 4
    weights = packed(kernels, matrix)

    def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
        rounding = wanted.abs() * torch.finfo(dtype).eps if found.dtype == torch.bfloat16 else 0
        assert ((found.double() - wanted).abs() <= size * eps * 4 + rounding).all()

    close(kernels.linear(x, weights, torch.empty(rows, outputs, dtype=dtype)), exact)
    residual = torch.randn(rows, outputs).to(dtype)
    out = kernels.linear(x, weights, residual.clone(), bias=padded(bias), add=True)
    close(out, exact + bias.double() + residual.double())
    if dtype == torch.bfloat16:
        close(kernels.linear(x, weights, torch.empty(rows, outputs)), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_a_row_the_same_bits_in_any_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    matrix, x = torch.randn(70, 1500).to(dtype), torch.randn(400, 1500).to(dtype)
    weights = packed(kernels, matrix)
    together = kernels.linear(x, weights, torch.empty(400, 70, dtype=dtype))
    for first, last in ((0, 1), (399, 400), (5, 12), (100, 129), (0, 399)):
        alone = kernels.linear(x[first:last], weights, torch.empty(last - first, 70, dtype=dtype))
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 3, 1)])
def test_each_group_of_rows_is_multiplied_by_its_dense_matrix(
    kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A row also gives the same bits without the other rows of its group."""
    torch.manual_seed(7)
    rows, inputs, outputs = shape
    ends = torch.tensor([rows // 3, rows // 3, rows - rows // 8, rows])  # the second group is empty
    x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]
    matrices, bias = torch.randn(4, outputs, inputs).to(dtype), torch.randn(4, outputs).to(dtype)
    found = kernels.products(x, matrices, bias, ends)
    groups = torch.bucketize(torch.arange(rows), ends, right=True)
    exact = torch.einsum("ti,toi->to", x.double(), matrices.double()[groups]) + bias.double()[groups]
    size = torch.einsum("ti,toi->to", x.double().abs(), matrices.double().abs()[groups]).max() + 1
    eps = torch.finfo(dtype).eps if dtype != torch.bfloat16 else torch.finfo(torch.float32).eps * 4
    rounding = exact.abs() * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
    assert ((found.double() - exact).abs() <= size * eps * 4 + rounding).all()
    for row in (0, rows // 2, rows - 1):
        group = int(groups[row])
        alone = kernels.products(x[row : row + 1], matrices[group], bias[group])
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_gated_and_weighted(kernels: Kernels, dtype: torch.dtype, *, biased: bool) -> None:
    """A row also gives the same bits alone; an expert number that does not exist adds nothing."""
    torch.manual_seed(8)
    rows, hidden, inner, count, each = 37, 44, 19, 5, 3
    x = torch.randn(rows, hidden + 3).to(dtype)[:, :hidden]
    enter, leave = ((torch.randn(count, *s) / 6).to(dtype) for s in ((2 * inner, hidden), (hidden, inner)))
    biases = [torch.randn(count, size).to(dtype) if biased else None for size in (2 * inner, hidden)]
    chosen = torch.stack([torch.randperm(count)[:each] for _ in range(rows)])
    chosen[3, 1] = count
    weights = torch.rand(rows, each)
    matrices = (enter, biases[0]), (leave, biases[1])
    found = kernels.experts(x, chosen, weights, *matrices)
    wanted = torch.zeros(rows, hidden, dtype=torch.float64)
    for row, j in ((r, j) for r in range(rows) for j in range(each) if chosen[r, j] < count):
        expert = chosen[row, j]
        enter_bias, leave_bias = (0 if bias is None else bias[expert].double() for bias in biases)
        gate, up = (enter[expert].double() @ x[row].double() + enter_bias).chunk(2)
        out = leave[expert].double() @ (torch.nn.functional.silu(gate) * up) + leave_bias
        wanted[row] += weights[row, j].double() * out
    assert ((found.double() - wanted).abs() <= wanted.abs().max() * torch.finfo(dtype).eps * 8).all()
    for row in (0, 3, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(kernels.experts(x[one], chosen[one], weights[one], *matrices)[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 18])
def test_heads_are_rotated_as_transformers_does(kernels: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    q_1NTH, k_1KTH = (torch.randn(1, 7, heads, head_dim).to(dtype).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(1, 7, head_dim // 2).repeat(1, 1, 2).to(dtype)
    cos, sin = angles.cos(), angles.sin()
    for heads, wanted in zip((q_1NTH, k_1KTH), apply_rotary_pos_emb(q_1NTH, k_1KTH, cos, sin), strict=True):
        found = kernels.rotated(heads[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None]
        torch.testing.assert_close(found, wanted, rtol=0, atol=torch.finfo(dtype).eps * 8)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_change_no_bit(kernels: Kernels, count: int) -> None:
    torch.manual_seed(3)
    matrix, x = torch.randn(500, 300), torch.randn(90, 300)
    weights = packed(kernels, matrix)
    once = kernels.linear(x, weights, torch.empty(90, 500))
    before, kernels.threads = kernels.threads, count
    try:
        for _ in range(200):
            assert torch.equal(kernels.linear(x, weights, torch.empty(90, 500)), once)
    finally:
        kernels.threads = before


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_written_as_torch_rounds(kernels: Kernels, dtype: torch.dtype) -> None:
    """Covers all values of the format, values between them, larger ones, and infinities."""
    torch.manual_seed(6)
    exact = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    exact = exact[~exact.isnan()]
    between = (exact[1:] + exact[:-1]) / 2
    more = torch.randn(4000) * 10 ** torch.empty(4000).uniform_(-4, 4)
    ends = torch.tensor([449.0, 464.0, 479.0, 1e30, -1e30, torch.inf, -torch.inf])
    values = torch.cat([exact, between, more, ends]).to(dtype)
    k_TKH = torch.nn.functional.pad(values, (0, -len(values) % 8)).view(-1, 1, 8)
    kv_B2TKH, slots = torch.zeros(len(k_TKH), 2, 1, 1, 8, dtype=FP8), torch.arange(len(k_TKH))
    kernels.write_kv(kv_B2TKH, k_TKH, -k_TKH, slots.data_ptr())
    for found, wanted in ((kv_B2TKH[:, 0], k_TKH), (kv_B2TKH[:, 1], -k_TKH)):
        assert torch.equal(found.flatten().view(torch.uint8), converted(wanted, FP8).flatten().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 50, 512])
def test_rms_norm_rounds_as_the_reference(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(9, width).to(dtype), torch.randn(width).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = weight * normed.to(dtype)
    found = kernels.rms_norm(x, weight, torch.empty_like(x), 1e-6)
    tolerance = 1e-6 if dtype != torch.bfloat16 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [8, 60, 128, 1408, 5120, 18000])
def test_float64_is_normed_bit_for_bit_as_in_the_reference(kernels: Kernels, width: int) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(20, width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).double()
    assert torch.equal(kernels.rms_norm(x, weight, torch.empty_like(x), 1e-6), expected)
