"""Checks the interpreted matrix product with fixed tiles. Run it as a program with TRITON_INTERPRET=1."""

import itertools
import os

import numpy as np
import torch

from services.worker.engine import products

TYPES = (torch.float32, torch.float16)  # the interpreter multiplies the bits of bfloat16 as if they were integers
SHAPES = ((70, 130), (33, 96))  # outputs, inputs: some tiles are partial; the first shape uses the wider tile
ROWS, ALONE = (3, 64, 65), (0, 1, 2, 17, 63, 64)


def multiply_rows(a: np.ndarray, b: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Replaces `numpy.matmul`, whose BLAS on some processors rounds a row depending on its position in the matrix,
    which a tensor core does not do.
    """
    return np.stack([np.einsum("k,kn->n", row, b, dtype=dtype) for row in a])


def compare(outputs: int, size: int, dtype: torch.dtype) -> None:
    """Checks that every row has the same bits alone and among others, at any position."""
    torch.manual_seed(0)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    multiply = products.InvariantProducts()
    x = torch.randn(max(ROWS), size + 2).to(dtype)[:, :size]  # rows are strided
    weight, bias = torch.randn(outputs, size).to(dtype), torch.randn(outputs).to(dtype)
    expected = x.double() @ weight.double().t() + bias.double()
    alone = {at: multiply(x[at : at + 1], weight, bias, x.new_empty(0))[0] for at in ALONE}
    for rows in ROWS:
        out = torch.full((rows, outputs + 3), torch.nan).to(dtype)
        multiply(x[:rows], weight, bias, out[:, :outputs])
        assert all(torch.equal(out[at, :outputs], row) for at, row in alone.items() if at < rows)
        assert out[:, outputs:].isnan().all()
        assert torch.equal(multiply(x[:rows].flip(0), weight, bias, out.new_empty(0)).flip(0), out[:, :outputs])
        torch.testing.assert_close(out[:, :outputs].double(), expected[:rows], atol=tolerance, rtol=1e-3)
    plain = multiply(x, weight, None, x.new_empty(0)).double()
    torch.testing.assert_close(plain, expected - bias.double(), atol=tolerance, rtol=1e-3)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    np.matmul = multiply_rows
    products._MANY_OUTPUTS = SHAPES[0][0]
    for (outputs, size), dtype in itertools.product(SHAPES, TYPES):
        compare(outputs, size, dtype)
