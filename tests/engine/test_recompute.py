"""What is computed a second time: what the backward needs, and nothing that reaches none of it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from everytype import write_model
from parity import assert_same, layers_of, streamed_step, whole_step
from tiny import NUM_LAYERS, Architecture, Checkpoint, micro_batches, write_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from trainedways import disturb, streamed_model, whole_model
from transformers import GPTNeoXConfig, JambaConfig, LlamaConfig, NemotronHConfig, PreTrainedConfig

from lema import LemaModel
from lema.engine.skip_matmuls import LastLinear, SavedProducts
from lema.model.shared_inputs import Product
from lema.plan.work.workload import MicroBatch

CheckpointOf = Callable[..., Checkpoint]

RECOMPUTED = {"gradient_checkpointing": True}
DEPTH = 8
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": DEPTH,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def parallel_blocks() -> PreTrainedConfig:
    return GPTNeoXConfig(**SIZES, hidden_dropout=0.0, attention_dropout=0.0)


def hybrid_with_experts() -> PreTrainedConfig:
    return JambaConfig(
        **SIZES,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    )


def shared_experts() -> PreTrainedConfig:
    return NemotronHConfig(
        **SIZES | {"num_hidden_layers": None},
        layers_block_type=["attention", "moe"] * (DEPTH // 2),
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
    )


OTHERS = {
    "parallel blocks": (parallel_blocks, "gpt_neox.layers"),
    "hybrid with experts": (hybrid_with_experts, "model.layers"),
    "shared experts": (shared_experts, "model.layers"),
}


@pytest.fixture
def checkpoint(
    request: pytest.FixtureRequest, checkpoint_of: CheckpointOf, tmp_path: Path
) -> Checkpoint:
    name, dropout = request.param
    if name not in OTHERS:
        return checkpoint_of(name, dropout=dropout)
    make, layers = OTHERS[name]
    published = write_model(make(), tmp_path / "published")
    architecture = Architecture(make, layers=layers, targets=frozenset())
    return Checkpoint(architecture, published, published)


@contextmanager
def skips_counted(model: LemaModel) -> Iterator[list[int]]:
    """Count the products that the recomputations of each layer skip in the `with` block."""
    counts = [0] * model.split.num_layers
    layer_of = {
        id(part): index
        for index, layer in enumerate(model.split.layers)
        for part in layer.modules()
    }
    unformed = Product.unformed

    def count(self: Product, given: Tensor) -> Tensor | None:
        made = unformed(self, given)
        form = self.form
        # the one that keeps the product, which is not asked for it
        while isinstance(form, Product):
            form = form.form
        counts[layer_of[id(form.__self__)]] += made is not None  # type: ignore[attr-defined] # a bound method
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Product, "unformed", count)
        yield counts


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    # model, PEFT's options, how many products each recomputation of a layer skips
    "all linears": ("llama", {}, 1),
    "attention alone": ("llama", {"target_modules": ["q_proj", "v_proj"]}, 0),
    "the last alone": ("llama", {"target_modules": ["down_proj"]}, 1),
    "dropout": ("llama", {"lora_dropout": 0.1}, 1),
    "magnitudes": ("llama", {"use_dora": True}, 0),
    "magnitudes, with dropout": ("llama", {"use_dora": True, "lora_dropout": 0.1}, 1),
    "ranks of another scale": ("llama", {"use_rslora": True}, 1),
    "all biases": ("gpt2", {"bias": "all"}, 1),
    "all biases, with dropout": ("gpt2", {"bias": "all", "lora_dropout": 0.1}, 1),
    "a bias of B": ("gpt2", {"lora_bias": True}, 1),
    "experts": ("mixtral", {"target_parameters": ["experts.down_proj"]}, 0),
    "a norm after the last": ("gemma2", {}, 0),
    "parallel blocks": ("parallel blocks", {"target_modules": "all-linear"}, 1),
    "hybrid with experts": (
        "hybrid with experts",
        {"target_modules": "all-linear", "exclude_modules": ["dt_proj"]},
        None,
    ),
    "shared experts": ("shared experts", {"target_modules": "all-linear"}, 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keep", [False, True], ids=["", "products kept"])
@pytest.mark.parametrize(
    ("checkpoint", "options", "products"),
    [
        ((name, options.get("lora_dropout", 0.0)), options, products)
        for name, options, products in CASES.values()
    ],
    ids=CASES.keys(),
    indirect=["checkpoint"],
)
def test_loss_and_gradients_are_those_of_the_whole_model_at_every_step(
    checkpoint: Checkpoint, options: dict[str, Any], products: int | None, keep: bool
) -> None:
    whole = whole_model(checkpoint, **options)
    disturb(whole)
    layers = layers_of(whole, checkpoint) if options.get("lora_dropout") else None
    with streamed_model(checkpoint, RECOMPUTED, **options) as model:
        disturb(model.lora_manager)
        if keep:
            model.adapter.activations.products = frozenset(range(NUM_LAYERS))
        for _ in range(2):
            batches = micro_batches(3, padding=True)
            with skips_counted(model) as counts:
                found = streamed_step(model, batches)
            # Products with adapted experts round otherwise than PEFT's sum.
            apart = 5e-6 if "target_parameters" in options else 0.0
            assert_same(found, whole_step(whole, batches, layer_major=layers), apart)
            *recomputed, top = counts
            assert top == 0
            if keep:
                assert min(recomputed) > 3 * (products or 0)
                continue
            assert products is None or set(recomputed) == {3 * products}
            assert products is not None or set(recomputed) == {0, 3}


@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
def test_kept_products_are_not_formed_again_and_take_the_bytes_of_the_plan(
    checkpoint_of: CheckpointOf, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[tuple[int, list[weakref.ref[Tensor]]]]()
    drop = SavedProducts.drop

    def noted(self: SavedProducts, last: LastLinear, total: int) -> None:
        drop(self, last, total)
        held.append(
            (
                self.nbytes,
                [weakref.ref(one.output) for made in self._outputs.values() for one in made],
            )
        )

    settings = RECOMPUTED | {"arithmetic": arithmetic, "max_length": 12}
    batches = micro_batches(1)
    rows, length = batches[0]["input_ids"].shape
    with streamed_model(checkpoint_of("llama"), settings) as model:
        model.adapter.activations.products = frozenset(range(NUM_LAYERS))
        planned = model.planner.work(MicroBatch(rows, length)).of(0)
        streamed_step(model, batches)  # sees what shares an input
        monkeypatch.setattr(SavedProducts, "drop", noted)
        with skips_counted(model) as counts:
            model.adapter.loss(batches).backward()
        assert counts == [7] * (NUM_LAYERS - 1) + [0]  # of all that a layer has
        assert [nbytes for nbytes, _ in held] == [planned.product_bytes] * (NUM_LAYERS - 1)
        assert planned.product_bytes == 4 * rows * length * (32 + 16 + 16 + 32 + 96 + 96)
        assert planned.product_flops == 2 * rows * length * 32 * (32 + 16 + 16 + 32 + 96 + 96)
        assert not [one for _, outputs in held for one in outputs if one() is not None]


def test_a_product_that_a_layer_writes_into_is_formed_again(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("llama", tmp_path)
    batches = micro_batches(2)
    found = []
    for products in (frozenset[int](), frozenset(range(NUM_LAYERS))):
        with streamed_model(
            checkpoint, RECOMPUTED, target_modules=["q_proj", "down_proj"]
        ) as model:
            disturb(model.lora_manager)
            model.adapter.activations.products = products
            for layer in model.split.layers:
                layer.mlp.forward = partial(write_into_gate, layer.mlp)
            with skips_counted(model) as counts:
                found.append(streamed_step(model, batches))
    assert counts[0] == 2 * (1 + 5)  # of six others, all but the one that was written into
    assert_same(*found)


@pytest.mark.parametrize("apart", [False, True], ids=["contiguous", "apart"])
def test_a_kept_product_has_its_bias_once(apart: bool, tmp_path: Path) -> None:
    """To inputs that are not contiguous torch adds the bias after the product."""
    config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    found = []
    directory = write_model(config, tmp_path / "model")
    checkpoint = Checkpoint(
        Architecture(lambda: config, layers="model.layers", targets=frozenset()), *[directory] * 2
    )
    for products in (frozenset[int](), frozenset(range(DEPTH))):
        with streamed_model(
            checkpoint, RECOMPUTED, target_modules=["q_proj", "down_proj"]
        ) as model:
            disturb(model.lora_manager)
            model.adapter.activations.products = products
            for layer in model.split.layers if apart else ():
                layer.mlp.forward = partial(from_apart, layer.mlp.forward)
            with skips_counted(model) as counts:
                found.append(streamed_step(model, micro_batches(2)))
    assert counts[0] == 2 * (5 if apart else 7)
    assert_same(*found)


def from_apart(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return forward(hidden.transpose(0, 1).contiguous().transpose(0, 1))


def write_into_gate(mlp: Any, hidden: Tensor) -> Tensor:
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden).mul_(2)) * mlp.up_proj(hidden))


class Flops(TorchDispatchMode):
    """Counts the arithmetic of matrix products, as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.count += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def flops(step: Callable[[], Any]) -> int:
    with Flops() as counted:
        step()
    return counted.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "spared"),
    [(["q_proj", "v_proj"], 0), (["q_proj", "down_proj"], 1), (None, 1)],
    ids=["attention", "the last", "all"],
)
def test_a_step_costs_what_checkpointing_costs_less_the_last_product_of_each_layer(
    checkpoint_of: CheckpointOf, targets: list[str] | None, spared: int
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(3)
    options = {} if targets is None else {"target_modules": targets}
    whole = whole_model(checkpoint, **options)
    kept = flops(lambda: whole_step(whole, batches))
    whole.activation_checkpointing_enable({"use_reentrant": False})
    whole.disable_input_require_grads()  # which nothing below the lowest adapter needs
    checkpointed = flops(lambda: whole_step(whole, batches))
    recomputation = (checkpointed - kept) // NUM_LAYERS
    assert recomputation * NUM_LAYERS == checkpointed - kept > 0
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    product = 2 * tokens * 96 * 32
    with streamed_model(checkpoint, RECOMPUTED, **options) as model:
        streamed_step(model, batches)
        for _ in range(2):
            found = flops(lambda: streamed_step(model, batches))
            # Neither is the top layer recomputed.
            assert found == checkpointed - recomputation - (NUM_LAYERS - 1) * spared * product
    with streamed_model(checkpoint, {"gradient_checkpointing": False}, **options) as model:
        streamed_step(model, batches)
        assert flops(lambda: streamed_step(model, batches)) == kept


@pytest.mark.covered(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "as_it_is"),
    [
        ({}, True),
        ({"lora_dropout": 0.1}, False),
        ({"use_dora": True}, False),
        ({"lora_bias": True}, True),
    ],
    ids=["plain", "dropout", "magnitudes", "a bias of B"],
)
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_share_their_input_in_half_precision_where_no_bit_changes(
    checkpoint_of: CheckpointOf, name: str, recompute: bool, options: dict[str, Any], as_it_is: bool
) -> None:
    checkpoint = checkpoint_of(name, dtype="bfloat16")
    batches = micro_batches(2, padding=True)
    whole = whole_model(checkpoint, dtype=torch.bfloat16, **options)
    disturb(whole)
    layers = layers_of(whole, checkpoint) if options.get("lora_dropout") else None
    with streamed_model(
        checkpoint, {"gradient_checkpointing": recompute, "dtype": "bfloat16"}, **options
    ) as model:
        disturb(model.lora_manager)
        for _ in range(2):
            expected = whole_step(whole, batches, autocast=torch.bfloat16, layer_major=layers)
            assert_same(streamed_step(model, batches), expected)
        adapted = [
            part
            for part in model.split.layers.modules()
            if hasattr(part, "cast_input_dtype_enabled")
        ]
        assert {part.cast_input_dtype_enabled for part in adapted} == {not as_it_is}


def test_a_layer_that_runs_another_way_the_second_time_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint("llama", tmp_path)
    with streamed_model(checkpoint, RECOMPUTED) as model:
        loss = model.adapter.loss(micro_batches(1))
        activation = type(model.split.layers[3].mlp.act_fn)
        monkeypatch.setattr(activation, "forward", lambda _, given: given)
        with pytest.raises(AssertionError, match="were recomputed: the layer ran differently"):
            loss.backward()


class Noted(torch.autograd.Function):
    """An activation whose place in a graph can be seen to live; `alive` has the most that did at
    once.
    """

    nodes: ClassVar[list[weakref.ref[Any]]] = []
    alive: ClassVar[int] = 0

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        Noted.nodes.append(weakref.ref(ctx))
        Noted.alive = max(Noted.alive, Noted.living())
        ctx.save_for_backward(given)
        return torch.tanh(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (given,) = ctx.saved_tensors
        return gradient * (1 - torch.tanh(given) ** 2)

    @classmethod
    def living(cls) -> int:
        return sum(node() is not None for node in cls.nodes)


class NotedActivation(torch.nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return Noted.apply(given)


@pytest.mark.parametrize("number", [1, 4])
def test_a_step_holds_the_graph_of_one_micro_batch_however_many_it_has(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(Noted, "nodes", [])
    monkeypatch.setattr(Noted, "alive", 0)
    with streamed_model(checkpoint_of("llama"), RECOMPUTED) as model:
        for layer in model.split.layers:
            layer.mlp.act_fn = NotedActivation()
        model.adapter.loss(micro_batches(1)).backward()  # a first step learns what layers return
        Noted.nodes.clear()
        gc.disable()  # nothing waits for the collector
        try:
            loss = model.adapter.loss(micro_batches(number))
            assert len(Noted.nodes) == number * NUM_LAYERS
            assert Noted.living() == 0
            loss.backward()
            # the top layer is not recomputed
            assert len(Noted.nodes) == number * (2 * NUM_LAYERS - 1)
            assert Noted.living() == 0
        finally:
            gc.enable()
        assert Noted.alive == 1
