"""What the last bit of a number depends on outside LEMA: where a weight begins in memory, modulo
16 bytes.
"""

import pytest
import torch
from torch import Tensor

FLOATS = 4  # in 16 bytes


def at_offset(values: Tensor, floats: int) -> Tensor:
    """Return the values in memory that begins so many numbers after an address that is a
    multiple of 64 bytes.
    """
    buffer = torch.empty(values.numel() + 32)
    first = -buffer.data_ptr() % 64 // buffer.itemsize + floats
    moved = buffer[first : first + values.numel()].view(values.shape)
    return moved.copy_(values)


@pytest.mark.parametrize("rows", [1, 2, 12])
@pytest.mark.parametrize("columns", [1, 33, 96])
def test_a_product_is_the_same_wherever_its_weight_begins_modulo_16_bytes(
    rows: int, columns: int
) -> None:
    """At other addresses it may differ: on the machine that this was written on, for one row it
    did.
    """
    torch.manual_seed(0)
    hidden = torch.randn(rows, 100)
    weight = torch.randn(columns, 100)
    products = [hidden @ at_offset(weight, floats).t() for floats in range(2 * FLOATS)]
    for floats in range(FLOATS):
        assert torch.equal(products[floats], products[floats + FLOATS])
