"""What decoder layers keep from call to call is what those of the whole model keep, or the model
is refused by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from asloaded import (
    edit_config,
    farthest_from_whole,
    llama,
    opened,
    roped,
    rows,
    step,
    store,
    tensors,
    write_model,
)
from everytype import farthest
from preferences import batch_of, examples, parts_of
from torch import Tensor
from transformers import MixtralConfig, RecurrentGemmaConfig
from uses import by_turns

from lema.errors import ModelError, NonFiniteError
from lema.model.state.layer import LayerState
from lema.model.state.snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore")

CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

class OwnConfig(LlamaConfig):
    model_type = "ownstate"

class Keeping(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        INIT

    def forward(self, x):
        KEEP
        made = super().forward(x * scale)
        AFTER
        return made

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Keeping(config)
        WHOLE
        self.post_init()
"""
# What a layer holds at first, and what each call makes of it; `scale` is what the call computes
# with.
MAKE = (
    "self.mean is None and (delattr(self, 'mean'), self.register_buffer('mean', "
    "torch.zeros(()), persistent=False))"
)
KEPT = {
    "a counter": ("self.count = 0", "self.count += 1; scale = 1 + self.count / 8"),
    "a mean": (
        "self.mean = None",
        "now = x.detach().mean(); self.mean = now if self.mean is None else 0.9 * "
        "self.mean + 0.1 * now;"
        " scale = 1 + self.mean",
    ),
    # A buffer that no file has is not there after `from_pretrained`, unless it is made in a call.
    "a buffer": (
        "self.mean = None",
        "MAKE; self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1); scale = 1 + self.mean",
    ),
    "a buffer that is replaced": (
        "self.mean = None",
        "MAKE; self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(); scale = 1 + self.mean",
    ),
    "a list": (
        "self.lengths = []",
        "self.lengths.append(x.shape[1]); scale = 1 + sum(self.lengths) / 256",
    ),
    "a dictionary": (
        "self.seen = {'longest': 0}",
        (
            "self.seen['longest'] = max(self.seen['longest'], x.shape[1]); scale = 1 + "
            "self.seen['longest'] / 64"
        ),
    ),
    "a view of its input": (
        "self.last = None",
        "scale = 1 + (0 if self.last is None else self.last.mean()); self.last = x.detach()[:, :1]",
    ),
    "a view of a weight": (
        "self.last = None",
        "scale = 1 + (0 if self.last is None else self.last.mean());"
        " self.last = self.up_proj.get_base_layer().weight.detach()[:2] if "
        "hasattr(self.up_proj, 'get_base_layer')"
        " else self.up_proj.weight.detach()[:2]",
    ),
    "a table that grows": (
        "self.table = None",
        "self.table = torch.arange(x.shape[1]) / 64 if self.table is None or "
        "len(self.table) < x.shape[1] else"
        " self.table; scale = 1 + self.table[-1]",
    ),
}


def keeping(
    directory: Path,
    init: str,
    keep: str,
    whole: str = "pass",
    after: str = "pass",
    *,
    moe: bool = False,
) -> Path:
    """Write a model whose layers keep something from call to call; `moe`: of mixtures of
    experts.
    """
    sizes = {**llama().to_dict(), "model_type": "mixtral", "num_local_experts": 4}
    model = write_model(MixtralConfig(**sizes) if moe else llama(), directory)
    code = (
        CODE.replace("INIT", init)
        .replace("KEEP", keep)
        .replace("MAKE", MAKE)
        .replace("WHOLE", whole)
    )
    code = code.replace("AFTER", after)
    if moe:  # whose name says how experts are stored
        code = (
            code.replace("ownstate", "mixtral")
            .replace("LlamaMLP", "MixtralSparseMoeBlock")
            .replace("llama", "mixtral")
            .replace("Llama", "Mixtral")
        )
    (model / "own.py").write_text(code)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(
        model,
        model_type="mixtral" if moe else "ownstate",
        architectures=["OwnForCausalLM"],
        auto_map=classes,
    )
    return model


def steps() -> Sequence[Sequence[Mapping[str, Tensor]]]:
    """Return steps of one and of several micro-batches, long and short."""
    return [rows(12), rows(20, 9, 40), rows(9, 30), rows(12)]


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_layer_keeps_is_what_it_keeps_in_the_whole_model(
    kept: str, checkpointing: bool, tmp_path: Path
) -> None:
    model = keeping(tmp_path / "model", *KEPT[kept])
    assert (
        farthest_from_whole(model, *steps(), trust=True, gradient_checkpointing=checkpointing) == 0
    )


def test_a_published_type_that_keeps_states_of_recurrences(tmp_path: Path) -> None:
    config = RecurrentGemmaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, lru_width=32,
        attention_window_size=16, head_dim=8, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = write_model(config, tmp_path / "model")
    assert farthest_from_whole(model, *steps()) == 0
    by_turns(model, [12, 9, 20, 12], [5, 9])


COUNTER = KEPT["a counter"]
MEAN = KEPT["a mean"]


def refused(model: Path, **settings: Any) -> ModelError:
    """Return why steps are refused."""
    with opened(model, trust=True, **settings) as streamed, pytest.raises(ModelError) as caught:
        for batches in (rows(12, 20), rows(12, 20)):
            streamed.adapter.loss(batches).backward()
    return caught.value


GLOBAL = "globals().setdefault('LENGTHS', [])"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a module of two layers": (
        {
            "init": COUNTER[0],
            "keep": COUNTER[1],
            "whole": "self.model.layers[2].mlp = self.model.layers[0].mlp",
        },
        "Keeping.count from call to call, and shares it with model.layers.2",
    ),
    "a list of all layers": (
        {
            "init": f"self.lengths = {GLOBAL}",
            "keep": "self.lengths.append(len(x)); scale = 1 + len(self.lengths) / 64",
        },
        "Keeping.lengths from call to call, and shares it with model.layers.1",
    ),
    "a list that the model has too": (
        {
            "init": "self.lengths = []",
            "keep": "self.lengths.append(len(x)); scale = 1",
            "whole": "self.lengths = [self.model.layers[0].mlp.lengths]",
        },
        "Keeping.lengths from call to call, and shares it with modules outside of the layers",
    ),
    "a state with its graph": (
        {"init": "self.last = None", "keep": "scale = 1 + (self.last or 0); self.last = x.mean()"},
        "Keeping.last from call to call, and differentiates through it",
    ),
    "a write with a graph": (
        {"init": "self.mean = None", "keep": "MAKE; self.mean.copy_(x.mean()); scale = 1"},
        "Keeping.mean from call to call, and writes into it with a graph",
    ),
    "a first write after other calls": (
        {
            "init": (
                "self.count = 0; self.register_buffer('last', torch.zeros(()), persistent=False)"
            ),
            "keep": "self.count += 1; self.count == 3 and self.last.fill_(2); scale = 1 + self.last",
        },
        (
            "Keeping.count, Keeping.last from call to call, and wrote into it for the first "
            "time only after other calls"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_reproduced_is_refused_by_name(case: str, tmp_path: Path) -> None:
    code, why = REFUSED[case]
    error = refused(keeping(tmp_path / "model", **code))
    assert why in error.what
    assert error.where == "model.layers.0"


class Group:
    """What all layers compute with, as a group of processes."""

    def __init__(self) -> None:
        self.waiting: list[int] = []

    def __deepcopy__(self, memo: Any) -> "Group":
        return self


def test_what_copies_of_a_layer_share_is_no_state_of_it() -> None:
    group = Group()
    layer = torch.nn.Module()
    layer.group = group
    layer.counts = [0]
    before = Snapshot(layer.modules())
    group.waiting.append(1)
    assert not before.changed()
    layer.counts.append(1)
    assert before.changed() == {layer: {"counts"}}


class Pair(NamedTuple):
    """What a layer keeps, and how often it ran."""

    state: Tensor
    count: int


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "a tuple": lambda state: (0, state),
    "a list in a dictionary": lambda state: {"states": [state]},
    "a named tuple": lambda state: Pair(state, 1),
    "what torch returns by names": lambda state: state.topk(1),
    "a set": lambda state: {state},
    "a frozen set in a list": lambda state: [frozenset({state})],
    "an attribute": lambda state: SimpleNamespace(state=state),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_layer_keeps_in_any_container_has_no_graph_of_the_call(holder: str) -> None:
    class Keeping(torch.nn.Module):
        last: object = None

        def forward(self, hidden: Tensor) -> Tensor:
            self.last = HOLDERS[holder](2 * hidden)
            return hidden + 1

    layer = Keeping()
    state = LayerState(layer, "layer 0")
    hidden = torch.ones(2, requires_grad=True)
    state.now()
    state.first(lambda: layer(hidden), hidden)
    expected = HOLDERS[holder](2 * hidden)
    assert type(layer.last) is type(expected)
    held = tensors_held(layer.last)
    assert [tensor.tolist() for tensor in held] == [
        tensor.tolist() for tensor in tensors_held(expected)
    ]
    for tensor in held:
        if tensor.is_floating_point():
            assert torch.autograd.grad(tensor.sum(), hidden, allow_unused=True) == (None,)


def tensors_held(value: Any) -> list[Tensor]:
    """Return the tensors in a container of any kind."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    items = value.values() if isinstance(value, dict) else value
    return [
        tensor
        for item in (items if isinstance(items, Iterable) else [])
        for tensor in tensors_held(item)
    ]


def test_a_stored_buffer_that_a_layer_writes_into_is_refused(tmp_path: Path) -> None:
    keep = "self.mean.add_(x.detach().mean()); scale = 1 + self.mean"
    model = keeping(tmp_path / "model", "self.register_buffer('mean', torch.zeros(()))", keep)
    stored = tensors(model)
    store(model, stored | {f"model.layers.{index}.mlp.mean": torch.ones(()) for index in range(4)})
    assert (
        "layer 0 writes into its mlp.mean, which is read from its file at each visit"
        in refused(model).what
    )


def test_the_rows_of_a_reference_see_no_state_of_a_layer(tmp_path: Path) -> None:
    model = keeping(tmp_path / "model", *COUNTER)
    with (
        opened(model, trust=True, objective="dpo") as streamed,
        pytest.raises(ModelError, match="of a reference"),
    ):
        streamed.adapter.loss(parts_of(batch_of(examples()), 2))


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_experts_in_groups_change_nothing_in_what_a_layer_keeps(
    again: bool, tmp_path: Path
) -> None:
    found = []
    for size in (None, 2):
        with opened(
            keeping(tmp_path / str(size), *MEAN, moe=True), trust=True, experts_per_slot=size
        ) as streamed:
            streamed.adapter.engine.runs_again = again
            found.append([step(streamed, batches) for batches in steps()])
            assert bool(streamed.memory.groups) == (size is not None)
    assert max(farthest(one, other) for one, other in zip(*found, strict=True)) <= 1e-6


def test_what_is_made_of_experts_in_groups_cannot_be_kept(tmp_path: Path) -> None:
    code = {
        "init": "self.last = None",
        "keep": "scale = 1",
        "after": "self.last = made.detach().mean()",
    }
    error = refused(keeping(tmp_path / "model", **code, moe=True), experts_per_slot=2)
    assert "which is made of its experts' result" in error.what


def test_a_compiled_layer_that_keeps_something_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lema.model.layers.compiled.COMPILER", "aot_eager")
    model = keeping(tmp_path / "model", *COUNTER)
    with pytest.warns(UserWarning, match="is not compiled.*: it keeps count from call to call"):
        assert (
            farthest_from_whole(model, rows(12), rows(12, 12), trust=True, torch_compile=True) == 0
        )
    torch.compiler.reset()


def outcomes(model: Path, place: str | None) -> list[Tensor]:
    """Take steps in passes that are attempted again; return losses and gradients. Memory runs out
    once, in the second step: in a `layer`, in a layer that is `recomputed`, or in the `head`."""
    found = []
    left = [place]
    with opened(model, trust=True, prefetch_depth=3) as streamed:
        split = streamed.split
        parameters = streamed.get_trainable_parameters()

        def short(here: str) -> None:
            if found and left == [here]:
                left.clear()
                raise torch.OutOfMemoryError("out of memory")

        def run_layer(index: int, *given: Any, **options: Any) -> Tensor:
            made = type(split).run_layer(split, index, *given, **options)
            if index == 1:
                short("layer" if torch._C._current_graph_task_id() == -1 else "recomputed")
            return made

        def head(*given: Any, **options: Any) -> Tensor:
            made = type(split).head(split, *given, **options)
            short("head")
            return made

        def attempt(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
            loss = streamed.adapter.loss(batches)
            loss.backward()
            return loss.detach()

        split.run_layer = run_layer
        split.head = head  # type: ignore[method-assign]
        for batches in steps():
            found.append(streamed.adapter.retry.run_pass(attempt, batches, parameters=parameters))
            found += [one.grad for one in parameters if one.grad is not None]
            streamed.lora_manager.zero_grad(set_to_none=True)
        del split.run_layer, split.head
    assert left == ([None] if place is None else [])
    return found


@pytest.mark.parametrize("kept", ["a mean", "a table that grows", "a rotary table"])
def test_a_pass_that_is_attempted_again_begins_with_what_was_kept(
    kept: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    model = (
        write_model(roped("dynamic"), directory)
        if kept == "a rotary table"
        else keeping(directory, *KEPT[kept])
    )
    expected = outcomes(model, None)
    for place in ("layer", "recomputed", "head"):
        found = outcomes(model, place)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (
            place
        )


def test_the_layer_whose_numbers_are_not_finite_is_found_where_it_counts_calls(
    tmp_path: Path,
) -> None:
    spoilt = "self.count += 1; scale = float('nan') if self.count == 2 else 1"
    with opened(keeping(tmp_path / "model", COUNTER[0], spoilt), trust=True) as streamed:
        trainer = streamed.get_trainer(torch.optim.SGD(streamed.get_trainable_parameters(), lr=0.1))
        trainer.train_step(rows(12)[0]["input_ids"])
        with pytest.raises(NonFiniteError, match=r"first non-finite output: model\.layers\.0"):
            trainer.train_step(rows(12)[0]["input_ids"])
        assert [layer.mlp.count for layer in streamed.split.layers] == [2] * 4


@pytest.mark.parametrize("kept", ["a counter", "a mean", "a buffer", "a list"])
def test_a_run_that_is_resumed_goes_on_with_what_layers_held(kept: str, tmp_path: Path) -> None:
    model = keeping(tmp_path / "model", *KEPT[kept])
    ids = rows(12)[0]["input_ids"]

    def losses(*, resumed: bool) -> list[float]:
        with opened(model, trust=True) as streamed:
            trainer = streamed.get_trainer(
                torch.optim.SGD(streamed.get_trainable_parameters(), lr=0.1)
            )
            if resumed:
                trainer.load_checkpoint(tmp_path / "checkpoint-1")
            else:
                trainer.train_step(ids)
                trainer.save_checkpoint(tmp_path / "checkpoint-1")
            return [trainer.train_step(ids)[1] for _ in range(2)]

    assert losses(resumed=False) == losses(resumed=True)


def test_a_model_that_keeps_nothing_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = 0
    looks = Snapshot.__init__

    def counted(*given: Any, **options: Any) -> None:
        nonlocal made
        made += 1
        looks(*given, **options)

    with opened(write_model(llama(), tmp_path / "model"), trust=True) as streamed:
        streamed.adapter.loss(rows(12)).backward()
        monkeypatch.setattr(Snapshot, "__init__", counted)
        for batches in steps():
            streamed.adapter.retry.run_pass(
                lambda parts: streamed.adapter.loss(parts).backward(), batches
            )
        streamed.adapter.evaluate(rows(9, 30))
    assert made == 0
