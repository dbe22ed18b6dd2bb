"""A quantised model streams small, and has the numbers of the whole model with the weights its
library expands.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    ALPHA,
    RANK,
    Outcome,
    assert_same,
    draw_b,
    streamed_model,
    streamed_step,
    trained,
    whole_model,
    whole_step,
)
from peft import LoraConfig, PeftModel, get_peft_model
from quantized import ARCHITECTURE, KINDS, NUM_LAYERS, checkpoint, dequantized, prepared, published
from smallrun import tokenizer, write_model
from tiny import Checkpoint, micro_batches, write_checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lema import LemaConfig, LemaModel
from lema.backend.trace import tracing
from lema.convert import merge_adapter
from lema.engine import complete
from lema.storage import GlobalBinaryIndex
from lema.stream.placement import slot_layout
from lema.stream.schedule import fetched_per_step
from lema_cpu import CpuBackend

kinds = pytest.mark.parametrize("kind", KINDS)
recomputed_or_not = pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])

CheckpointOf = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    source = published(tmp_path_factory.mktemp("quantized") / "published")
    return cache(lambda kind: checkpoint(source, kind))


@pytest.fixture(scope="module")
def whole_outcome(quantized: CheckpointOf) -> Callable[[str], Outcome]:
    @cache
    def take(kind: str) -> Outcome:
        model = whole_model(quantized(kind))
        draw_b(model)
        return whole_step(model, micro_batches(3, padding=True))

    return take


@pytest.mark.covered(3)
@pytest.mark.sampled(1)
@kinds
@recomputed_or_not
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_loss_and_gradients_are_those_of_the_librarys_weights(
    quantized: CheckpointOf, whole_outcome: Any, kind: str, recompute: bool, depth: int
) -> None:
    spent = {"slots": depth + 1}
    with streamed_model(quantized(kind), gradient_checkpointing=recompute, spent=spent) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, micro_batches(3, padding=True)), whole_outcome(kind))
        assert model.memory.num_slots == depth + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_experts_have_the_numbers_of_the_librarys_weights(
    tmp_path: Path, kind: str
) -> None:
    source = write_checkpoint("mixtral", tmp_path)
    small = prepared(source.published, kind).path
    whole, loaded = (
        AutoModelForCausalLM.from_pretrained(path) for path in (source.published, small)
    )
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if hasattr(parameter.data, "qdata"):
                whole.get_parameter(name).copy_(parameter.data.dequantize())
    whole.save_pretrained(tmp_path / "whole")
    compared = Checkpoint(source.architecture, tmp_path / "whole", small)
    with_peft = whole_model(compared)
    batches = micro_batches(2, padding=True)
    draw_b(with_peft)
    with streamed_model(compared, lora_target_modules=sorted(source.architecture.targets)) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(with_peft, batches))


@pytest.mark.sampled(1)
@kinds
@recomputed_or_not
def test_what_stays_on_the_device_or_in_host_memory_stays_quantised(
    quantized: CheckpointOf, whole_outcome: Any, kind: str, recompute: bool
) -> None:
    residents = frozenset({1, 4, 7})
    cached = frozenset({0, 3, 6})
    with streamed_model(
        quantized(kind),
        gradient_checkpointing=recompute,
        prefetch_depth=1,
        spent={"residents": residents, "host_cached": cached},
    ) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, micro_batches(3, padding=True)), whole_outcome(kind))
        stream = model.memory
        assert stream.residents == residents
        assert stream.host_cached == cached
        for layer in residents:
            assert stream._resident.slots[layer].numel() == slot_layout(stream.layers[layer]).nbytes
        for layer in cached:
            assert stream._host[layer].numel() == stream.layers[layer].nbytes


@pytest.mark.slow
@kinds
def test_slots_that_are_host_buffers_give_the_same_numbers(
    quantized: CheckpointOf, whole_outcome: Any, kind: str
) -> None:
    with streamed_model(quantized(kind), poison=False, gradient_checkpointing=False) as model:
        draw_b(model.lora_manager)
        for _ in range(2):  # the second step expands into memory that the first has used
            assert_same(streamed_step(model, micro_batches(3, padding=True)), whole_outcome(kind))


@pytest.mark.slow
@kinds
def test_a_step_reads_the_stored_bytes_alone(quantized: CheckpointOf, kind: str) -> None:
    with streamed_model(quantized(kind), prefetch_depth=1, gradient_checkpointing=True) as model:
        stream = model.memory
        # the first step finds nothing kept from a step before
        streamed_step(model, micro_batches(2))
        before = stream.counters
        streamed_step(model, micro_batches(2))
        after = stream.counters
        read = fetched_per_step(NUM_LAYERS, stream.num_slots, frozenset())
        assert (
            after.bytes_read - before.bytes_read
            == sum(stored_bytes(model, layer) for layer in read)
            > 0
        )
        assert after.bytes_uploaded - before.bytes_uploaded <= stream.slot_bytes * len(read)
        assert after.seconds_expanding > before.seconds_expanding > 0


def stored_bytes(model: LemaModel, layer: int) -> int:
    return sum(
        record.nbytes
        for name, record in model.gbi.items()
        if name.startswith(f"model.layers.{layer}.")
    )


@pytest.mark.slow
@kinds
def test_slots_are_small_and_every_layer_is_expanded_into_one_buffer(
    tmp_path: Path, kind: str
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    source = published(tmp_path / "published", torch.bfloat16, **sizes)
    with streamed_model(Checkpoint(ARCHITECTURE, source, source)) as model:
        whole = model.memory.slot_bytes
    small = prepared(source, kind).path
    with streamed_model(Checkpoint(ARCHITECTURE, small, small), poison=False) as model:
        stream = model.memory
        assert stream.slot_bytes < (0.35 if kind == "nf4" else 0.6) * whole
        assert stream.slot_bytes == max(layer.nbytes for layer in stream.layers)
        # read in place, at one go
        assert all(len(layer.runs) == 1 and not layer.casts for layer in stream.layers)
        with stream.lease(0) as lease:
            assert lease.expanded is not None
            place = lease.expanded.data_ptr()
            room = lease.expanded.numel()
            assert lease.weights["mlp.up_proj.weight"].dtype == torch.bfloat16
        assert room == max(layer.expanded_bytes for layer in stream.layers)
        with stream.lease(1) as lease:
            assert lease.expanded is not None
            assert lease.expanded.data_ptr() == place


@pytest.mark.slow
@kinds
def test_expanded_weights_are_poisoned_when_their_lease_ends(
    quantized: CheckpointOf, kind: str
) -> None:
    with streamed_model(quantized(kind)) as model:
        for layer in (3, 3):
            with model.memory.lease(layer) as lease:
                weight = lease.weights["self_attn.q_proj.weight"]
                assert not weight.isnan().any()
            assert weight.isnan().all()


def test_two_layers_on_lease_at_once_are_expanded_into_two_buffers(quantized: CheckpointOf) -> None:
    with streamed_model(quantized("int8"), poison=False) as model:
        name = "mlp.down_proj.weight"
        with model.memory.lease(3) as lease:
            third = lease.weights[name].clone()
        with model.memory.lease(3) as outer, model.memory.lease(4) as inner:
            assert torch.equal(outer.weights[name], third)
            assert not torch.equal(inner.weights[name], third)


@kinds
def test_references_find_expanded_weights_and_stored_ones_in_another_lease(
    quantized: CheckpointOf, kind: str
) -> None:
    with streamed_model(quantized(kind)) as model:
        for name in ("self_attn.k_proj.weight", "input_layernorm.weight"):
            with model.memory.lease(5) as lease:
                turned = lease.weights[name].t()
                reference = lease.refer(turned)
                expected = turned.clone()
            assert reference is not None
            with model.memory.lease(5) as again:
                assert torch.equal(again.resolve(reference), expected)
                assert again.refer(torch.empty(3)) is None


@kinds
def test_a_model_in_another_dtype_expands_to_that(quantized: CheckpointOf, kind: str) -> None:
    with streamed_model(quantized(kind), dtype="bfloat16") as model, model.memory.lease(2) as lease:
        found = lease.weights["self_attn.v_proj.weight"].clone()
    with streamed_model(quantized(kind)) as model, model.memory.lease(2) as lease:
        exact = lease.weights["self_attn.v_proj.weight"]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=0)


def test_a_trace_shows_when_layers_were_expanded(quantized: CheckpointOf, tmp_path: Path) -> None:
    config = LemaConfig(
        str(quantized("int8").streamed), device="cpu", device_memory=None, lora_rank=2, save_steps=0
    )
    with tracing(tmp_path / "trace.json") as trace:
        model = LemaModel(config, trace=trace)
        with model.memory.lease(7):
            pass
        model.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (row,) = [
        event["tid"]
        for event in events
        if event["ph"] == "M" and event["args"].get("name") == "expand"
    ]
    assert [event["name"] for event in events if event["ph"] == "X" and event["tid"] == row] == [
        "layer 7"
    ]


# What else is done with a model


@kinds
def test_magnitudes_and_whole_modules_start_from_the_expanded_weights(
    quantized: CheckpointOf, kind: str
) -> None:
    options = {"lora_use_dora": True, "lora_target_modules": ["q_proj", "down_proj"]}
    whole = get_peft_model(
        AutoModelForCausalLM.from_pretrained(quantized(kind).published),
        LoraConfig(r=RANK, lora_alpha=ALPHA, use_dora=True, target_modules=["q_proj", "down_proj"]),
    )
    expected = {name: p for name, p in trained(whole).items() if "magnitude" in name}
    with streamed_model(quantized(kind), **options) as model:
        found = trained(model.lora_manager)
        assert len(expected) == 2 * NUM_LAYERS
        for name, parameter in expected.items():
            assert torch.equal(found[name], parameter), name


@pytest.mark.slow
@kinds
def test_merging_gives_the_expanded_model_with_the_adapter_in_it(
    quantized: CheckpointOf, tmp_path: Path, kind: str
) -> None:
    with streamed_model(quantized(kind), lora_target_modules=["q_proj", "up_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "adapter")
    out = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(quantized(kind).published)
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@kinds
def test_evaluation_has_the_loss_of_the_whole_model(quantized: CheckpointOf, kind: str) -> None:
    (batch,) = micro_batches(1, padding=True)
    whole = whole_model(quantized(kind)).eval()
    with streamed_model(quantized(kind)) as model, torch.no_grad():
        model.lora_manager.eval()
        assert torch.equal(model.adapter.evaluate([batch])[0], whole(**batch).loss)


def test_what_is_quantised_outside_the_layers_is_expanded_once(tmp_path: Path) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["embed_tokens"]
    )
    source = published(tmp_path / "published", num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(
        tmp_path / "small"
    )
    whole, (batch,) = dequantized(tmp_path / "small").eval(), micro_batches(1)
    assert "lm_head.weight.absmax" in GlobalBinaryIndex(tmp_path / "small")
    model = LemaModel(
        LemaConfig(str(tmp_path / "small"), device="cpu", device_memory=None, save_steps=0)
    )
    model.skeleton.eval()
    assert torch.equal(model.skeleton.lm_head.weight, whole.lm_head.weight)
    with torch.no_grad():
        assert torch.equal(model.adapter.evaluate([batch])[0], whole(**batch).loss)
    model.close()


def test_without_quantised_weights_nothing_is_expanded(tmp_path: Path) -> None:
    source = published(tmp_path / "published", num_hidden_layers=2)
    with streamed_model(Checkpoint(ARCHITECTURE, source, source)) as model:
        streamed_step(model, micro_batches(1))
        assert {layer.expanded_bytes for layer in model.memory.layers} == {0}
        assert model.memory.counters.seconds_expanding == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_generated_tokens_are_those_of_the_whole_model(tmp_path: Path, kind: str) -> None:
    source = write_model(tmp_path / "model")
    small = prepared(source, kind).path
    inputs = tokenizer()("the miller of", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        expected = dequantized(small).generate(**inputs, do_sample=False, max_new_tokens=5)
    config = LemaConfig(str(small), device="cpu", device_memory=None, save_steps=0)
    model = LemaModel(config, backend=CpuBackend(poison=True))
    prompts = inputs["input_ids"].tolist()
    (found,) = complete(
        model.split, model.memory, model.files.generation_config(), model.tokenizer, prompts, 5, {}
    )
    model.close()
    assert list(found.tokens) == expected[0, inputs["input_ids"].shape[1] :].tolist()
