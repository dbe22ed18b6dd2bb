"""The cpu backend's own attention: transformers' `sdpa` but for rounding, and `sdpa` itself
where it covers nothing.
"""

from typing import Any

import pytest
import torch
from everytype import compare, micro_batches, opened, write_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from lema_cpu import attention

SIZES = (2, 4, 2, 6)  # rows, heads, heads of keys, of a head


class Attending(nn.Module):
    """What transformers hands to an attention function as its module."""

    is_causal = True
    num_key_value_groups = 2


def tensors(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows, heads, few, size = SIZES
    generator = torch.Generator().manual_seed(length)
    shapes = [(rows, heads, length, size), (rows, few, length, size), (rows, few, length, size + 2)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(
    forward: Any, given: list[Tensor], mask: Tensor | None, **options: Any
) -> list[Tensor]:
    out = forward(Attending(), *given, mask, **options)[0]
    chosen = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, given, chosen)]


def masked(length: int) -> Tensor:
    """A causal mask of flags with padding in front of the first row, which then sees itself
    alone.
    """
    mask = (
        torch.ones(length, length, dtype=torch.bool)
        .tril()
        .expand(SIZES[0], 1, length, length)
        .clone()
    )
    mask[0, :, :, : length // 3] = False
    mask |= torch.eye(length, dtype=torch.bool)
    return mask


@pytest.mark.parametrize("flags", [False, True], ids=["causal", "mask of flags"])
@pytest.mark.parametrize("length", [2, 128, 300, 512])
def test_it_is_sdpa_but_for_rounding(
    length: int, flags: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tensors(length)
    mask = masked(length) if flags else None
    expected = gradients(sdpa_attention_forward, given, mask, scaling=0.3)
    # which would be called, and fail
    monkeypatch.setattr(functional, "scaled_dot_product_attention", None)
    for one, other in zip(
        gradients(attention.attend, given, mask, scaling=0.3), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_in_bfloat16_it_is_as_near_to_the_exact_result_as_transformers_own_products_are() -> None:
    given = tensors(256, torch.bfloat16)
    length = 256
    exact = gradients(
        sdpa_attention_forward, [one.detach().double().requires_grad_() for one in given], None
    )
    added = torch.zeros(length, length).masked_fill(
        ~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf
    )

    def error(forward: Any, mask: Tensor | None) -> float:
        pairs = zip(gradients(forward, given, mask, scaling=SIZES[3] ** -0.5), exact, strict=True)
        return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)

    assert error(attention.attend, None) < 1.3 * error(
        eager_attention_forward, added[None, None].bfloat16()
    )


@pytest.mark.parametrize(
    ("length", "dtype", "options"),
    [
        (attention.LONGEST + 1, torch.float32, {}),
        (16, torch.float64, {}),
        (16, torch.float32, {"position_bias": torch.ones(1, 4, 16, 16)}),
        (16, torch.float32, {"is_causal": False}),
    ],
    ids=["longer", "another dtype", "a bias", "both ways"],
)
def test_what_it_does_not_cover_is_sdpa_itself(
    length: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    given = tensors(length, dtype)
    expected = gradients(sdpa_attention_forward, given, None, **options)
    found = gradients(attention.attend, given, None, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_fast_arithmetic_attends_so_and_settings_that_name_an_attention_do_not(
    tmp_path: Any,
) -> None:
    directory = write_model(LlamaConfig(**SMALL), tmp_path)
    calls: list[int] = []
    attend = attention.attend

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(given[1].shape[2])
        return attend(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, counted)
        for settings, wanted in (
            ({"arithmetic": "fast"}, True),
            ({"arithmetic": "fast", "attn_implementation": "sdpa"}, False),
            ({}, False),
        ):
            calls.clear()
            with opened(directory, **settings) as model:
                model.adapter.loss(micro_batches()).backward()
            assert bool(calls) is wanted, settings


def test_a_step_with_it_is_pefts_but_for_rounding(tmp_path: Any) -> None:
    found = compare(LlamaConfig(**SMALL), tmp_path, arithmetic="fast")
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 5e-6


SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
