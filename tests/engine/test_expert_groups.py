"""A layer whose experts are leased in groups: the numbers of whole layers, in smaller slots."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import difference, micro_batches, opened, write_model
from parity import draw_b, trained
from publishedforms import write_dequantized, write_published
from tinyconfig import tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig

from lema import LemaConfig, LemaModel
from lema.convert.prepare import prepare
from lema.convert.tensors import read_tensor
from lema.engine.generation import streaming_forward
from lema.engine.layers import experts
from lema.engine.stack import LayerStack
from lema.errors import ConfigError, MemoryLimitError
from lema.model import experts as routing
from lema.model import meta_model
from lema.model.experts import NarrowedExperts
from lema.model.weight_names import map_names
from lema.plan.memory import device_parts
from lema.storage import GlobalBinaryIndex
from lema.stream.schedule import fetched, in_parts, training_order
from lema_cpu import CpuBackend

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# The second has a shared expert, and two dense layers, which stay whole.
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=8),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        **LATENT,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=2,
    ),
}
SPARSE = {"qwen3_moe": 8, "deepseek_v3": 6}  # layers
ADAPTED: dict[str, Any] = {"lora_target_parameters": None}  # the default, experts among them
pytestmark = pytest.mark.filterwarnings(
    "ignore:PEFT does not adapt these linear modules",
    "ignore:.*_pattern keys",
    "ignore:.*is_gradient_checkpointing.*",
)
Gradients = dict[str, Tensor]
# Types with stacked experts, once in a layer, and several of them in a tiny model.
KINDS = (
    "afmoe aria aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 "
    "deepseek_v2 deepseek_v3 "
    "deepseek_v32 deepseek_v4 dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe "
    "flex_olmo flint glm4_moe "
    "glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe granitemoe_swa "
    "granitemoehybrid "
    "granitemoeshared hy_v3 hy_v4 inkling2 inkling2_text inkling_text jamba kimi_k25 "
    "kimi_linear kolibri1 laguna "
    "lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text "
    "mistral4 mistral_large4 "
    "mixtral muse_spark nemotron_h nemotron_h_omni olmoe phimoe qwen2_moe qwen3_5_moe "
    "qwen3_5_moe_text qwen3_moe "
    "qwen3_next qwen3_omni_moe_thinker qwen3_vl_moe qwen4_exp qwen4_exp_text solar_open "
    "unlimited_ocr zaya "
)
# Of these, those whose backward looks at what experts have made.
LOOKED_AT = (
    "afmoe axk1 beam deepseek_v4 flex_olmo glm5_next hy_v4 inkling2 inkling2_text "
    "inkling_text kolibri1 "
    "muse_spark qwen4_exp qwen4_exp_text "
)


def step(model: LemaModel, loss: Callable[[], Tensor] | None = None) -> tuple[Tensor, Gradients]:
    """Take a step of four micro-batches; return its loss and every adapter's gradient."""
    draw_b(model.lora_manager)
    torch.manual_seed(0)
    value = model.adapter.loss(micro_batches() * 2) if loss is None else loss()
    value.backward()
    found = {
        name: one.grad for name, one in trained(model.lora_manager).items() if one.grad is not None
    }
    model.lora_manager.zero_grad()
    return value.detach(), found


def apart(found: Gradients, expected: Gradients) -> float:
    """How far all gradients together are from those expected, relative to their length."""
    assert found.keys() == expected.keys()
    one, other = (
        torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)
    )
    return difference(one, other)


def both(
    directory: Path, run: Callable[[LemaModel], Any], size: int = 3, **settings: Any
) -> list[Any]:
    """What `run` finds of a model with whole layers, and with experts in groups."""
    found = []
    for each in (None, size):
        with opened(directory, experts_per_slot=each, **ADAPTED, **settings) as model:
            draw_b(model.lora_manager)
            found.append(run(model))
            assert bool(model.memory.groups) == (each is not None)
    return found


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_is_that_of_whole_layers(kind: str, tmp_path: Path) -> None:
    """But for the order of additions: loss and gradients within 1e-6, of experts' adapters too,
    in smaller slots.
    """
    directory = write_model(CONFIGS[kind], tmp_path)
    with opened(directory, **ADAPTED) as model:
        loss, expected = step(model)
        whole = model.memory.slot_bytes
    assert sum(".experts." in name for name in expected) == SPARSE[kind] * 2 * 2
    for size in (2, 3):
        with opened(directory, experts_per_slot=size, **ADAPTED) as model:
            grouped_loss, found = step(model)
            assert model.memory.slot_bytes < whole * (0.35 if size == 2 else 0.4)
        assert difference(grouped_loss, loss) <= 1e-6
        assert apart(found, expected) <= 1e-6
        # By processor: 4.13e-6 where products of few rows have blocks of their own (AVX-512, 27
        # November 2026).
        assert max(difference(found[name], expected[name]) for name in found) <= 5e-6


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_group_that_many_tokens_choose_runs_several_times(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no more pairs at once than the plan has room for, and the same numbers but for the order
    of additions."""
    directory = write_model(CONFIGS[kind], tmp_path)
    with opened(directory, experts_per_slot=3, **ADAPTED) as model:
        loss, expected = step(model)
    monkeypatch.setattr(routing, "LEAST_PAIRS", 1)
    monkeypatch.setattr(routing, "PAIRS_AT_ONCE", 0.3)
    runs = list[tuple[int, int]]()
    run = NarrowedExperts.run

    def counted(narrowed: NarrowedExperts, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        group = narrowed.group
        most = max(routing.most_pairs(len(rows), 3, group.end - group.first, 8) for rows in tokens)
        runs.append((len(inputs[0]), most))
        return run(narrowed, inputs)

    tokens = [batch["input_ids"].flatten() for batch in micro_batches()]
    monkeypatch.setattr(NarrowedExperts, "run", counted)
    with opened(directory, experts_per_slot=3, **ADAPTED) as model:
        again, found = step(model)
    assert all(0 < pairs <= most for pairs, most in runs)
    # three groups in each layer, up and down, of four micro-batches
    assert len(runs) > 2 * 4 * 3 * SPARSE[kind] * 2
    assert difference(again, loss) <= 1e-6
    assert apart(found, expected) <= 1e-6


@pytest.mark.parametrize("kind", CONFIGS)
def test_all_micro_batches_go_through_a_group_before_the_next_is_leased(
    kind: str, tmp_path: Path
) -> None:
    """So leases do not depend on how many there are, reads are those of the formula, and no bit
    depends on slots.
    """
    directory = write_model(CONFIGS[kind], tmp_path)
    first = None
    for depth in (1, 6):
        with opened(directory, experts_per_slot=3, prefetch_depth=depth, **ADAPTED) as model:
            stream = model.memory
            reads = list[int]()
            assert [len(own) for own in stream.parts.values()] == [3] * SPARSE[kind]
            for _ in range(2):
                loss, found = step(model)
                reads.append(stream.counters.layers_read)
                first = (loss, found) if first is None else first
                assert torch.equal(loss, first[0])
                assert all(torch.equal(one, first[1][name]) for name, one in found.items())
        # Each layer up and down, its groups with it; the top layer once, its groups both ways.
        assert stream.counters.leases == 2 * (8 + 7 + 2 * 3 * SPARSE[kind])
        order = in_parts(training_order(8), stream.parts, top_layer=7, pinned=True)
        expected = [len(fetched(order * steps, depth + 1)) for steps in (1, 2)]
        assert reads == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_evaluation_and_generation_are_those_of_whole_layers(kind: str, tmp_path: Path) -> None:
    def run(model: LemaModel) -> tuple[Tensor, Tensor]:
        value, _ = model.adapter.evaluate(micro_batches())
        ids = micro_batches()[0]["input_ids"][:, :5]
        model.skeleton.eval()
        with torch.no_grad(), streaming_forward(model.split, model.memory):
            made = model.skeleton.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=4,
                do_sample=False,
            )
        return value, made

    (value, made), (other, others) = both(write_model(CONFIGS[kind], tmp_path), run)
    assert difference(other, value) <= 1e-6 and torch.equal(others, made)


@pytest.mark.parametrize("lowest", [0, 4])
def test_so_is_a_step_of_the_layers_in_a_model_that_somebody_calls(
    lowest: int, tmp_path: Path
) -> None:
    """As `transformers.Trainer` does, with nothing to train in the layers below `lowest`."""

    def run(model: LemaModel) -> tuple[Tensor, Gradients]:
        for layer in model.split.layers[:lowest]:
            layer.requires_grad_(False)
        stack, (batch, *_) = LayerStack(model.adapter, rows=1), micro_batches()
        found = [step(model, lambda: model.lora_manager(**batch).loss) for _ in range(2)]
        stack.take_out()
        return found[1]

    (loss, expected), (other, found) = both(write_model(CONFIGS["qwen3_moe"], tmp_path), run)
    assert difference(other, loss) <= 1e-6 and apart(found, expected) <= 1e-6


def test_so_is_the_loss_of_routers_with_inputs_that_wait_elsewhere(tmp_path: Path) -> None:
    def run(model: LemaModel) -> tuple[Tensor, Gradients]:
        model.get_trainer()
        return step(model)

    settings = {
        "router_aux_loss_coef": 0.3,
        "boundary_activations": "disk",
        "offload_dir": tmp_path,
    }
    (loss, expected), (other, found) = both(
        write_model(CONFIGS["qwen3_moe"], tmp_path), run, **settings
    )
    assert difference(other, loss) <= 1e-6 and apart(found, expected) <= 1e-6


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of every pass through the groups of a layer for what experts make, whether it was in the
    forward or later.
    """
    found = list[str]()
    results = experts.ExpertGroups.results

    def watched(*args: Any) -> list[Tensor]:
        found.append(args[2] if len(args) > 2 else "forward")
        return results(*args)

    monkeypatch.setattr(experts.ExpertGroups, "results", watched)
    return found


def test_groups_are_leased_once_more_where_a_backward_looks_at_what_experts_made(
    tmp_path: Path, ways: list[str]
) -> None:
    """As that of a norm behind the experts does."""
    (loss, expected), (other, found) = both(
        write_model(tiny_config("flex_olmo"), tmp_path), step, size=1
    )
    assert difference(other, loss) <= 1e-6 and apart(found, expected) <= 1e-6
    assert "backward" in ways


@pytest.mark.slow
@pytest.mark.covered(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS.split())
def test_any_type_trains_in_groups(kind: str, tmp_path: Path, ways: list[str]) -> None:
    (loss, expected), (other, found) = both(write_model(tiny_config(kind), tmp_path), step, size=1)
    assert difference(other, loss) <= 1e-6 and apart(found, expected) <= 1e-6
    assert ("backward" in ways) == (kind in LOOKED_AT.split())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_moe", {"router_aux_loss_coef": 0.3, "boundary_activations": "host"}),
        ("deepseek_v3", {"lora_dropout": 0.3, "lora_target_parameters": []}),
        ("mixtral", {}),
        ("flex_olmo", {}),
    ],
)
def test_what_comes_before_experts_is_run_twice_with_no_other_numbers(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Where it would take too much while it waits. Bitwise, with what dropout draws, the loss of
    routers, and backwards that look at what experts made; leases are as many."""
    directory = write_model(CONFIGS.get(kind) or tiny_config(kind), tmp_path)
    found = list[Any]()
    for again in (False, True):
        with opened(directory, **{"experts_per_slot": 3, **ADAPTED, **settings}) as model:
            model.spend(replace(model.allocation, runs_again=again))
            model.get_trainer()
            before = model.memory.counters.leases
            loss, gradients = step(model)
            found.append(
                (loss, gradients, model.memory.counters.leases - before, torch.get_rng_state())
            )
    (loss, expected, leases, drawn), (other, gradients, others, then) = found
    assert torch.equal(other, loss) and leases == others and torch.equal(drawn, then)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], one) for name, one in expected.items())


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Has memory run out in a group of experts, as often as the list that is yielded says why:
    it is asked for each.
    """
    asked = list[Any]()
    run = NarrowedExperts.run

    def watched(experts: NarrowedExperts, given: Any) -> Tensor:
        made = run(experts, given)
        if asked and asked[0](experts.group, torch.is_grad_enabled()):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return made

    monkeypatch.setattr(NarrowedExperts, "run", watched)
    yield asked


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_memory_that_runs_out_in_a_group_is_answered_as_in_a_layer(
    way: str, tmp_path: Path, short: list[Any]
) -> None:
    """The pass begins again with fewer slots and the same numbers; where there are only two, with
    fewer rows; and if one row does not fit, the error says in which experts of which layer, and
    what to set."""
    with opened(
        write_model(CONFIGS["qwen3_moe"], tmp_path),
        experts_per_slot=3,
        prefetch_depth=3,
        learning_rate=0.0,
    ) as model:
        trainer = model.get_trainer()
        batches = micro_batches()
        expected = trainer.accumulate(batches, more=True).loss
        group = model.memory.groups[5][1]
        assert model.memory.name_of(group.number) == "experts 3 to 5 of layer 5"
        place = f"in the {way} of experts 3 to 5 of layer 5"

        def here(given: Any, differentiated: bool) -> bool:
            return bool(given == group and differentiated == (way == "backward"))

        short.append(lambda *given: here(*given) and model.memory.num_slots > 2)
        with pytest.warns(UserWarning, match=rf"ran out {place}.*2 layer slots instead of 4"):
            found = trainer.accumulate(batches, more=True).loss
        assert found == expected
        short[:] = [here]
        with pytest.raises(MemoryLimitError, match=r"1 row of .* do not fit") as error:
            trainer.accumulate(batches, more=True)
        assert error.value.where == place and error.value.how


def test_gradients_of_experts_adapters_are_formed_of_a_group_alone(tmp_path: Path) -> None:
    """So however many groups there are, no more tensors as large as an adapter of all experts
    are made in a step.
    """
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path)
    made = dict[int, int]()
    for size in (1, 4):
        with opened(directory, experts_per_slot=size, lora_rank=11, **ADAPTED) as model:
            draw_b(model.lora_manager)
            shapes = {
                one.shape
                for name, one in trained(model.lora_manager).items()
                if ".experts." in name
            }
            shapes |= {
                (8, *each)
                for width in (24, 32, 48)
                for rank in (11, 12)
                for each in permutations((rank, width))
            }

            class Large(TorchDispatchMode):
                count = 0

                def __torch_dispatch__(
                    self, func: Any, types: Any, args: Any = (), kwargs: Any = None
                ) -> Any:
                    out = func(*args, **kwargs or {})
                    given, new = (
                        {
                            one.untyped_storage()._cdata: one
                            for one in tree_leaves(some)
                            if isinstance(one, Tensor)
                        }
                        for some in ((args, kwargs), out)
                    )
                    self.count += sum(new[key].shape in shapes for key in new.keys() - given.keys())  # noqa: B023 - at once
                    return out

            with Large() as large:
                model.adapter.loss(micro_batches()).backward()
            made[size] = large.count
    assert made[1] <= made[4]


def test_device_memory_says_how_many_experts_are_leased_together(tmp_path: Path) -> None:
    """As many as it holds; all, in whole layers, where it holds these. The slots are those of the
    plan. What comes before the experts is run twice where with no size all that waits for them
    fits."""
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path)
    found = dict[str, tuple[int, bool]]()
    for limit in ("800KB", "640KB", "610KB", "560KB", "540KB"):
        settings = {
            "lora_rank": 2,
            "batch_size": 4,
            "micro_batch_size": 1,
            "max_length": 12,
            "save_steps": 0,
        }
        config = LemaConfig(str(directory), device="cpu", device_memory=limit, **settings)
        with closing(LemaModel(config, backend=CpuBackend(poison=True))) as model:
            model.initialize_lora()
            needs = model.planner.needs()
            assert (
                sum(device_parts(needs.demand, needs.allocation).values())
                <= model.planner.limits[0]
            )
            assert model.memory.slot_bytes * needs.allocation.slots == needs.device["slots"]
            found[limit] = needs.allocation.experts, model.adapter.engine.runs_again
            if needs.allocation.experts:
                assert [*model.memory.groups] == [*range(8)] and model.adapter.activations.recompute
                step(model)
    assert found == {
        "800KB": (0, False),
        "640KB": (4, False),
        "610KB": (2, False),
        "560KB": (1, False),
        "540KB": (2, True),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_checkpointing": False}, "gradient_checkpointing: false"),
        ({"torch_compile": True}, "torch_compile"),
        ({"objective": "dpo"}, "objective: dpo"),
        ({"activation_offloading": True}, "activation_offloading"),
    ],
)
def test_what_does_not_go_with_groups_is_said_in_one_sentence(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path)
    with (
        opened(directory, experts_per_slot=2, **settings) as model,
        pytest.raises(ConfigError, match=said) as error,
    ):
        _ = model.allocation
    assert error.value.where == "experts_per_slot"


def test_a_model_without_stacked_experts_has_none_to_lease_in_groups(tmp_path: Path) -> None:
    directory = write_model(tiny_config("llama"), tmp_path)
    with (
        opened(directory, experts_per_slot=2) as model,
        pytest.raises(ConfigError, match="LlamaForCausalLM has no stacked experts"),
    ):
        _ = model.allocation


# A type for each form in which experts are published quantised, and one for what `lema prepare`
# makes.
FORMS = {
    "fp8 in blocks": "deepseek_v3",
    "int4 experts": "kimi_k25",
    "mxfp4": "gpt_oss",
    "fp4 experts, fp8": "deepseek_v4",
    "gptq": "qwen3_moe",
    "awq": "qwen3_moe",
}
OWN = ("int8", "fp8", "nf4")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            form, marks=[] if form in ("fp8 in blocks", "int4 experts", "nf4") else pytest.mark.slow
        )
        for form in (*FORMS, *OWN)
    ],
)
def test_experts_that_are_stored_quantised_are_those_of_the_dequantised_model(
    form: str, tmp_path: Path
) -> None:
    """Bit for bit, in groups as well; what is read is what is stored of a group. That model is
    prepared, because the last bit of a product depends on where in a line of the processor's cache
    a weight begins."""
    if form in FORMS:
        stored = write_published(tiny_config(FORMS[form]), form, tmp_path / "stored")
        plain = write_dequantized(stored, tmp_path / "plain")
    else:
        config = Qwen3MoeConfig(
            **SIZES | {"hidden_size": 64, "moe_intermediate_size": 64}, head_dim=32, num_experts=8
        )
        stored = prepare(
            write_model(config, tmp_path / "published"), tmp_path / "stored", quantize=form
        ).path
        plain = write_expanded(config, stored, tmp_path / "plain")
    whole = prepare(plain, tmp_path / "whole").path
    found = list[tuple[Tensor, Gradients]]()
    read = list[int]()
    for directory in (whole, stored):
        for size in (1, 3):
            with opened(directory, experts_per_slot=size, dtype="float32", **ADAPTED) as model:
                found.append(step(model))
                assert model.memory.groups
                read.append(
                    max(one.read_bytes for one in model.memory.layers[model.memory.num_visited :])
                )
    for (loss, gradients), (other, others) in zip(found[:2], found[2:], strict=True):
        assert torch.equal(loss, other)
        assert gradients.keys() == others.keys()
        assert all(torch.equal(one, others[name]) for name, one in gradients.items())
    assert all(small < 0.5 * large for small, large in zip(read[2:], read[:2], strict=True))


def write_expanded(config: PreTrainedConfig, stored: Path, directory: Path) -> Path:
    """Write what a quantised model's weights expand to as one that is not quantised."""
    plain = AutoModelForCausalLM.from_config(config)
    records = map_names(meta_model(config, torch.float32), GlobalBinaryIndex(stored)).stored
    plain.load_state_dict(
        {name: read_tensor(record, torch.float32) for name, record in records.items()}, strict=False
    )
    plain.save_pretrained(directory)
    return directory
