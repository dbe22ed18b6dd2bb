"""`arithmetic: fast`: PEFT's numbers but for rounding, with one product for what reads one
input.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import compare, difference, micro_batches, opened, write_model
from parity import draw_b, trained
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from smallrun import streamed_logits, whole_logits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

import lema
from lema import LemaConfig
from lema.backend import SingleProcess
from lema.errors import ConfigError
from lema.model import Split, shared_inputs, split
from lema.model.capture import replaced
from lema.model.shared_inputs import Product, SharedInputs, multiply_together
from lema_cpu import CpuBackend

LAYERS = 8
RANK = 2  # that of `opened`
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),  # norms of queries and keys
    "gpt2": GPT2Config(  # linears that are transposed
        vocab_size=96,
        n_embd=32,
        n_layer=LAYERS,
        n_head=2,
        n_positions=64,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi3": Phi3Config(**SIZES),  # queries, keys and values are one linear
    "gemma2": Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=5),
}
# linears of one input
SHARED = {
    "llama": [3, 2],
    "qwen3": [3, 2],
    "gpt2": [],
    "phi3": [],
    "gemma2": [3, 2],
}
# because what else fast attends by is no linear
FAST = {
    "arithmetic": "fast",
    "attn_implementation": "sdpa",
}


def gradients_of(directory: Path, products: int = 0, **settings: Any) -> dict[str, Tensor]:
    """Return every adapter gradient of a streamed step of two micro-batches, where some layers
    keep `products`.
    """
    with opened(directory, **settings) as model:
        model.adapter.activations.products = frozenset(range(products))
        draw_b(model.lora_manager)
        model.adapter.loss(micro_batches()).backward()
        return {
            name: one.grad
            for name, one in trained(model.lora_manager).items()
            if one.grad is not None
        }


def together(layers: nn.ModuleList) -> list[SharedInputs]:
    """Have the layers of a whole model compute as those of a streamed one do."""
    multiply_together(layers)
    sharing = [SharedInputs() for _ in layers]

    def forward(layer: nn.Module, shared: SharedInputs) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with replaced({layer: None}), shared.used(layer, {}, args, kwargs):
                return layer(*args, **kwargs)

        return run

    for layer, shared in zip(layers, sharing, strict=True):
        vars(layer)["forward"] = forward(layer, shared)
    return sharing


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_is_pefts_but_for_rounding(kind: str, recompute: bool, tmp_path: Path) -> None:
    found = compare(CONFIGS[kind], tmp_path, gradient_checkpointing=recompute, arithmetic="fast")
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 5e-6 and not found.idle_layers
    # each by itself may round as PEFT's do, where the scaling is 2
    assert found.worst > 0 or not SHARED[kind]


@pytest.mark.parametrize("kind", CONFIGS)
def test_in_float64_nothing_is_left_of_the_difference(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float64)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules="all-linear", fan_in_fan_out=kind == "gpt2"
    )
    peft = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    draw_b(peft)
    ids = micro_batches()[0]["input_ids"]
    found = []
    for way in (lambda _: None, together):
        layers = model.transformer.h if kind == "gpt2" else model.model.layers
        sharing = way(layers)
        loss = peft(input_ids=ids, labels=ids, use_cache=False).loss
        found.append([loss, *torch.autograd.grad(loss, [*trained(peft).values()])])
    assert all(difference(one, other) < 1e-12 for one, other in zip(*found, strict=True))
    assert any(difference(one, other) for one, other in zip(*found, strict=True))
    groups = [
        sorted({len(group) for group in shared._groups.values()} - {1}, reverse=True)
        for shared in sharing
    ]
    assert groups == [SHARED[kind]] * LAYERS


def test_a_graph_that_is_recomputed_and_one_that_is_kept_are_bitwise_one(tmp_path: Path) -> None:
    """The recomputation leaves the same product out as PEFT's, of every layer but the top one."""
    skipped = Counter[Any]()
    directory = write_model(CONFIGS["llama"], tmp_path)
    unformed = Product.unformed

    def count(self: Product, given: Tensor) -> Tensor | None:
        made = unformed(self, given)
        skipped[self.form] += made is not None
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Product, "unformed", count)
        one = gradients_of(directory, **FAST)
    other = gradients_of(directory, gradient_checkpointing=False, **FAST)
    kept = gradients_of(directory, LAYERS, **FAST)
    assert all(
        torch.equal(one[name], gradients[name]) for gradients in (other, kept) for name in one
    )
    assert len(skipped) == LAYERS - 1 and set(skipped.values()) == {len(micro_batches())}


def test_in_bf16_it_is_no_farther_from_the_truth_than_peft(tmp_path: Path) -> None:
    published = write_model(CONFIGS["llama"], tmp_path, torch.bfloat16)
    truth = gradients_of(published, dtype="float32")

    def distance(**settings: Any) -> float:
        found = gradients_of(published, **settings)
        together = [torch.cat([one[name].flatten() for name in truth]) for one in (found, truth)]
        return difference(*together)

    assert 0 < distance(**FAST) <= 1.2 * distance()


class Products(TorchDispatchMode):
    """Counts products of two matrices by what they make, and sums and products of wide tensors'
    elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[int, ...]] = Counter()
        self.elementwise = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            self.products[tuple(made.shape)] += 1
        self.elementwise += (
            name in ("mul", "add", "add_") and made.dim() > 0 and made.shape[-1] > 3 * RANK
        )
        return made


def counted(directory: Path, **settings: Any) -> Products:
    """Count what one micro-batch computes in a step whose graphs are kept, after one in which
    layers were tried.
    """
    batches = micro_batches()[:1]
    with opened(directory, gradient_checkpointing=False, **settings) as model:
        draw_b(model.lora_manager)
        model.adapter.loss(batches).backward()
        with Products() as products:
            model.adapter.loss(batches).backward()
    return products


def test_linears_of_one_input_share_the_product_with_their_a(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["llama"], tmp_path)
    tokens = micro_batches()[0]["input_ids"].numel()
    exact = counted(directory)
    fast = counted(directory, **FAST)
    # Forward x A', and backward dy B for each linear; without sharing it is 7 each.
    assert exact.products[tokens, RANK] == LAYERS * (7 + 7)
    assert fast.products[tokens, RANK] == LAYERS * (2 + 7)
    assert fast.products[tokens, 3 * RANK] == fast.products[tokens, 2 * RANK] == LAYERS
    # Of A: one each of those groups, in place of 3 and 2.
    assert fast.products[3 * RANK, 32] == fast.products[2 * RANK, 32] == LAYERS
    # A scaling and an addition of each linear in the forward; in the backward its scaling and two
    # sums of gradients.
    assert exact.elementwise - fast.elementwise >= LAYERS * 7 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"lora_use_dora": True},
        {"lora_dropout": 0.1},
        {"lora_lora_bias": True},
        {"lora_bias": "lora_only"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_it_does_not_cover_are_computed_as_peft_does(
    options: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_model(CONFIGS["llama"], tmp_path)
    torch.manual_seed(0)
    exact = gradients_of(directory, **options)
    torch.manual_seed(0)
    fast = gradients_of(directory, **options, **FAST)
    assert exact and all(torch.equal(gradient, fast[name]) for name, gradient in exact.items())


def test_what_is_saved_is_pefts(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["llama"], tmp_path / "base")
    ids = micro_batches()[0]["input_ids"]
    with opened(directory, **FAST) as model:
        draw_b(model.lora_manager)
        said = streamed_logits(model, ids)
        with model.lora_manager.disable_adapter():
            bare = streamed_logits(model, ids)
        model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert torch.equal(bare, whole_logits(base, ids))
    whole = PeftModel.from_pretrained(base, tmp_path / "adapter")
    # 0 on processors that round both orders alike
    assert difference(said, whole_logits(whole, ids)) <= 1e-6


def test_a_streamed_model_computes_fast_and_two_adapters_at_once_as_peft(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["llama"], tmp_path)
    ids = micro_batches()[0]["input_ids"]
    found = {}
    other = LoraConfig(r=RANK, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    for arithmetic in ("exact", "fast"):
        lora = LoraConfig(r=RANK, lora_alpha=4, target_modules="all-linear")
        model = lema.streamed(
            directory, lora, device="cpu", device_memory=None, arithmetic=arithmetic
        )
        try:
            draw_b(model.train())
            model(input_ids=ids, labels=ids).loss.backward()
            one = torch.cat([one.grad.flatten() for one in trained(model).values()])
            model.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            model.add_adapter("other", other)
            model.base_model.set_adapter(["default", "other"])
            several = [
                part
                for part in model.modules()
                if isinstance(part, Linear) and len(part.lora_A) == 2
            ]
            assert len(several) == 2 * LAYERS
            found[arithmetic] = one, model(input_ids=ids, labels=ids).loss.detach()
        finally:
            model.close()
    (exact, loss), (fast, same) = found.values()
    assert 0 < difference(fast, exact) <= 2e-6 and difference(same, loss) <= 1e-6


def test_attention_shares_beside_experts_whose_way_depends_on_values(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    with opened(write_model(config, tmp_path), **FAST) as model:
        model.adapter.loss(micro_batches()).backward()
        groups = [
            {len(group) for group in shared._groups.values()}
            for shared in model.split.attached.sharing.values()
        ]
    assert len(groups) == LAYERS and all(3 in sizes for sizes in groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "widest"),
    # Parallel blocks share attention's input with the MLP's. Linears of a class of its own, as
    # falcon's, are PEFT's.
    [("gptj", 4), ("cohere", 5), ("olmo2", 3), ("jamba", 3), ("falcon", 0)],
)
def test_no_architecture_is_named(
    model_type: str, widest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [0]
    forward = shared_inputs._Sums.forward

    def counted_forward(
        ctx: Any, given: Tensor, dtype: torch.dtype, factors: Any, *tensors: Any
    ) -> Any:
        sums.append(len(factors))
        return forward(ctx, given, dtype, factors, *tensors)

    monkeypatch.setattr(shared_inputs._Sums, "forward", staticmethod(counted_forward))
    found = compare(model_type, tmp_path, arithmetic="fast")
    assert max(sums) == widest
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 1e-5


class Layer(nn.Module):
    """Two adapted linears of one tensor; what is done in between is given."""

    def __init__(self, between: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = LoraConfig(init_lora_weights=False)
        bases = [nn.Linear(6, 6).requires_grad_(False) for _ in range(2)]
        self.one, self.two = (Linear(base, "default", options, r=2, lora_alpha=1) for base in bases)
        self.between = between

    def forward(self, given: Tensor) -> Tensor:
        state = given * 1.0
        first = self.one(state)
        self.between(state, first)
        return first + self.two(state)


@pytest.mark.parametrize("which", ["input", "output"])
def test_what_a_model_writes_into_is_seen(which: str) -> None:
    """An input that has changed is another input, and an output may be written into as PEFT's
    may.
    """

    def between(state: Tensor, made: Tensor) -> None:
        with torch.no_grad():  # of the input, of which the graph has a copy
            _ = state.mul_(2.0) if which == "input" else None
        _ = made.mul_(3.0) if which == "output" else None

    layer = Layer(between)
    given = torch.randn(4, 6)
    expected = layer(given)
    shared = SharedInputs()
    multiply_together(layer)
    for _ in range(2):
        with shared.used(layer, {}, (given,), {}):
            found = layer(given)
        torch.testing.assert_close(found, expected)
    assert all(len(group) == 2 for group in shared._groups.values())


def test_a_wider_input_is_cast_once_and_its_gradient_is_as_wide() -> None:
    """As where norms leave fp32 under autocast of bf16: the casts are PEFT's, and so is each
    dtype.
    """
    layer = Layer(lambda *_: None)
    found = []
    for linear in (layer.one, layer.two):
        linear.base_layer.bfloat16()
    for way in (lambda _: None, multiply_together):
        way(layer)
        given = torch.linspace(-1, 1, 48).view(2, 4, 6).requires_grad_()
        shared = SharedInputs()
        with torch.autocast("cpu", torch.bfloat16), shared.used(layer, {}, (given,), {}):
            made = layer(given)
        made.float().square().sum().backward()
        found.append([made.detach(), given.grad, *(one.grad for one in trained(layer).values())])
        layer.zero_grad(set_to_none=True)
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert difference(one.float(), other.float()) <= 2e-2


def test_seeing_what_shares_an_input_draws_nothing(tmp_path: Path) -> None:
    """The same dropouts fall as with PEFT's own linears, though the first run of each layer is
    tried before.
    """
    config = GPT2Config(**{**CONFIGS["gpt2"].to_dict(), "attn_pdrop": 0.1, "resid_pdrop": 0.1})
    directory = write_model(config, tmp_path)
    found = []
    for arithmetic in ("exact", "fast"):
        with opened(directory, arithmetic=arithmetic) as model:
            torch.manual_seed(0)
            loss = model.adapter.loss(micro_batches())
            found.append((loss.detach(), torch.get_rng_state()))
    (exact, state), (fast, other) = found
    assert difference(fast, exact) <= 1e-6 and torch.equal(state, other)


class Two(SingleProcess):
    size = 2


def test_where_it_would_not_be_true_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "torch_compile compiles the code that arithmetic: fast replaces; leave one of them out"
        ),
    ):
        LemaConfig("model", arithmetic="fast", torch_compile=True)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    with pytest.raises(ConfigError, match="several processes hold the model together"):
        Split(model, CpuBackend(), parallel=Two(), fast=True)
    monkeypatch.setattr(split, "has_addresses", lambda _: False)
    with pytest.raises(ConfigError, match="compiles what is run on it"):
        Split(model, CpuBackend(), fast=True)


def test_a_layer_whose_experts_are_leased_in_groups_multiplies_together_too(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    found = compare(config, tmp_path, experts_per_slot=2, **FAST)
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 1e-5
