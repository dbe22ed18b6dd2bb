"""A mutated checkpoint, opened by LEMA and by `from_pretrained` with PEFT: what differs in a
step and after it.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aligned import aligned
from asloaded import opened, store, tensors, write_model
from everytype import SEED
from mutation import Mutation, batches_of
from parity import DRAWS, draw_b, trained
from peft import LoraConfig, PeftModel, get_peft_model
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

import lema
from lema import LemaModel
from lema.convert.merge import merge_adapter
from lema.engine import complete
from lema.engine.head.routers import add_router_loss
from lema.errors import LemaError
from lema.model.skeleton import auto_class
from lema.storage.modelfiles import load_generation_config

__all__ = ["Verdict", "compare", "write"]

NEW = 3  # tokens
STAGES = ("open", "train", "generate", "streamed", "merge", "auto")
TOKENIZER: Any = SimpleNamespace(eos_token_id=2, pad_token_id=0)


@dataclass
class Outcome:
    """What came of a model: by stage (`open`, `train`, `generate`, `merge`) its values, or why
    it was refused.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    # of those refused, what is no error of LEMA's
    raised: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """How LEMA and `transformers` with PEFT compare.

    Attributes:
        differences: where the numbers are not the same, or LEMA fails without a sentence of its
            own.
        refused: what LEMA alone refuses, by stage, and its sentence.
        accepted: what `transformers` alone refuses, by stage, and its message.
        unwritten: why `transformers` cannot write such a model.
    """

    differences: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)
    unwritten: str = ""


def write(model_type: str, mutation: Mutation, directory: Path) -> Path:
    """Write a tiny model of a type, mutated."""
    config = tiny_config(model_type)
    model = write_model(_built(config, mutation.built), directory)
    if mutation.stored is not None:
        store(model, mutation.stored(tensors(model)))
    file = model / "config.json"
    written = json.loads(file.read_text())
    for part in (written, *(one for one in written.values() if isinstance(one, dict))):
        for name in mutation.dropped:
            part.pop(name, None)
    if "text_config" in written:
        written["text_config"] |= mutation.edited
    else:
        written |= mutation.edited
    file.write_text(json.dumps(written | dict(mutation.top)))
    if mutation.files is not None:
        mutation.files(model)
    return model


def _built(config: PreTrainedConfig, settings: Any) -> PreTrainedConfig:
    if not settings:
        return config
    every = config.to_dict()
    if "text_config" in every:
        every["text_config"] |= settings
    else:
        every |= settings
    return type(config)(**every)


def compare(model_type: str, mutation: Mutation, directory: Path) -> Verdict:
    """Open, train, generate and merge both ways, and compare bit for bit."""
    try:
        model = write(model_type, mutation, directory / "model")
    except Exception as error:  # noqa: BLE001 - `transformers` cannot make it, so there is nothing to open
        return Verdict(unwritten=_said(error))
    vocabulary = mutation.built.get("vocab_size", 96)
    batches = [
        {name: torch.where(one < 0, one, one % vocabulary) for name, one in batch.items()}
        for batch in batches_of(mutation)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, adapter = _lema(model, mutation, batches, directory)
        theirs = _whole(model, mutation, batches, adapter)
    return _verdict(mine, theirs)


def _verdict(mine: Outcome, theirs: Outcome) -> Verdict:
    verdict = Verdict()
    for stage in STAGES:
        if stage in mine.raised and mine.raised[stage] != theirs.refused.get(stage):
            verdict.differences.append(f"{stage}: {mine.raised[stage]}")
        elif stage in mine.refused and stage in theirs.values:
            verdict.refused[stage] = mine.refused[stage]
        elif stage in mine.values and stage in theirs.refused:
            verdict.accepted[stage] = theirs.refused[stage]
        elif stage in mine.values and stage in theirs.values:
            apart = _apart(mine.values[stage], theirs.values[stage])
            verdict.differences.extend(f"{stage}: {what}" for what in apart)
    return verdict


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _apart(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Name what is not the same, to the bit."""
    if mine.keys() != theirs.keys():
        return [f"others: {sorted(mine.keys() ^ theirs.keys())[:4]}"]
    found = []
    for name, expected in theirs.items():
        value = mine[name]
        if isinstance(expected, Tensor) and isinstance(value, Tensor):
            if value.dtype != expected.dtype or not torch.equal(value, expected):
                apart = (
                    ""
                    if value.shape != expected.shape
                    else f" by {float((value - expected).abs().max()):.2g}"
                )
                found.append(f"{name}{apart}")
        elif value is None or expected is None:
            present = expected if value is None else value
            if isinstance(present, Tensor) and bool(present.any()):
                found.append(f"{name}: only one has it")
        elif value != expected:
            found.append(f"{name}: {value}, not {expected}")
    return found[:4]


def _lema(
    model: Path, mutation: Mutation, batches: list[dict[str, Tensor]], directory: Path
) -> tuple[Outcome, LoraConfig | None]:
    outcome = Outcome()
    adapter: LoraConfig | None = None

    def stage(name: str, run: Callable[[], dict[str, Any]]) -> bool:
        try:
            outcome.values[name] = run()
        except LemaError as error:
            outcome.refused[name] = str(error)
        except Exception as error:  # noqa: BLE001 - of the model's own code; it has to be the whole model's, too
            outcome.refused[name] = outcome.raised[name] = _said(error)
        return name in outcome.values

    def all_stages() -> dict[str, Any]:
        nonlocal adapter
        settings = {"dtype": "float32"} | dict(mutation.opened)
        with opened(model, **settings) as streamed:
            adapter = streamed.lora_manager.peft_config["default"]
            outcome.values["open"] = {}
            stage("train", lambda: _trained(streamed, model, batches))
            if mutation.generates:
                stage("generate", lambda: _generated(streamed, model, batches[0]["input_ids"]))
            stage("save", lambda: streamed.save_pretrained(str(directory / "adapter")) or {})
        return {}

    if stage("open", all_stages) and adapter is not None and "save" in outcome.values:
        outcome.values.pop("save")
        stage("streamed", lambda: _streamed(model, directory / "adapter", mutation, batches[0]))
        stage(
            "merge",
            lambda: _merged(merge_adapter(directory / "adapter", directory / "merged"), model),
        )
        shutil.rmtree(directory / "merged", ignore_errors=True)
    if mutation.auto:
        stage("auto", lambda: _stored_values(model))
    return outcome, adapter


def _trained(streamed: LemaModel, model: Path, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    add_router_loss(streamed.adapter, streamed.config, model)
    torch.manual_seed(DRAWS)
    loss = streamed.adapter.loss(batches)
    loss.backward()
    return _step(streamed.lora_manager, loss)


def _step(model: PeftModel, loss: Tensor) -> dict[str, Any]:
    values: dict[str, Any] = {name: one.grad for name, one in trained(model).items()}
    model.zero_grad(set_to_none=True)
    return values | {"loss": loss.detach()}


def _streamed(
    model: Path, adapter: Path, mutation: Mutation, batch: dict[str, Tensor]
) -> dict[str, Any]:
    """Call the model as another trainer does, by `lema.streamed`."""
    settings = {"dtype": "float32", "device": "cpu", "save_steps": 0} | dict(mutation.opened)
    streamed = lema.streamed(str(model), str(adapter), **settings)
    try:
        return _called(streamed, batch, mutation)
    finally:
        streamed.close()


def _called(model: Any, batch: dict[str, Tensor], mutation: Mutation) -> dict[str, Any]:
    """Return what a model in evaluation makes of a batch, and the tokens that its own `generate`
    adds.
    """
    model.eval()
    with torch.no_grad():
        output = model(**batch, use_cache=False)
        values = {"loss": output[0], "logits": output[1]}
        if mutation.generates:
            options = {
                "do_sample": False,
                "use_cache": True,
                "max_new_tokens": NEW,
                "return_dict_in_generate": False,
            }
            values["tokens"] = model.generate(batch["input_ids"], **options)
    return values


def _generated(streamed: LemaModel, model: Path, prompts: Tensor) -> dict[str, Any]:
    made = complete(
        streamed.split,
        streamed.memory,
        load_generation_config(model),
        TOKENIZER,
        prompts.tolist(),
        NEW,
        {},
    )
    return {str(row): list(one.tokens) for row, one in enumerate(made)}


def _merged(directory: Path, source: Path) -> dict[str, Any]:
    """Return the values of a merged checkpoint, as `from_pretrained` reads them. Its own class
    decides the names. What that does not read of the source, either, as an image tower, is copied.
    """
    loaded, report = _load(directory, output_loading_info=True)
    wrong = {
        name: list(report[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if wrong["unexpected_keys"]:
        copied = _load(source, output_loading_info=True)[1]["unexpected_keys"]
        wrong["unexpected_keys"] = sorted({*wrong["unexpected_keys"]} - {*copied})
    return dict(loaded.state_dict()) | {name: found for name, found in wrong.items() if found}


def _stored_values(model: Path) -> dict[str, Any]:
    with opened(model) as streamed:
        names = [name for name, one in streamed.records.items()]
        found = streamed.read_stored(names)
        return {"dtype": streamed.skeleton.config.dtype} | {
            name: one.clone() for name, one in found.items()
        }


def _load(directory: Path, **options: Any) -> Any:
    return auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, **options)


def _whole(
    model: Path, mutation: Mutation, batches: list[dict[str, Tensor]], adapter: LoraConfig | None
) -> Outcome:
    outcome = Outcome()

    def stage(name: str, run: Callable[[], dict[str, Any]]) -> bool:
        try:
            outcome.values[name] = run()
        except Exception as error:  # noqa: BLE001 - whatever `transformers` and PEFT raise is a refusal of theirs
            outcome.refused[name] = _said(error)
        return name in outcome.values

    loaded: list[Any] = []
    load = mutation.whole or partial(_load, dtype=torch.float32, **mutation.opened)
    if stage("open", lambda: loaded.append(load(model)) or {}) and adapter is not None:
        base = aligned(loaded[0])
        torch.manual_seed(SEED)
        whole = get_peft_model(base, adapter).train()
        draw_b(whole)
        # a module may keep what earlier calls left, such as a longer rotary table
        untouched = copy.deepcopy(whole)
        stage("train", lambda: _whole_step(whole, batches))
        if mutation.generates:
            stage("generate", lambda: _whole_generated(whole, batches[0]["input_ids"]))
        stage("streamed", lambda: _called(untouched, batches[0], mutation))
        stage("merge", lambda: dict(whole.merge_and_unload().state_dict()))
    if mutation.auto:
        stage("auto", lambda: _loaded_values(_load(model)))
    return outcome


def _whole_step(whole: PeftModel, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    options = {} if len(batches) == 1 else {"num_items_in_batch": tokens}
    torch.manual_seed(DRAWS)
    total = torch.zeros(())
    for batch in batches:
        loss = whole(**batch, **options, use_cache=False)[0]
        loss.backward()
        total = total + loss.detach()
    return _step(whole, total)


def _whole_generated(whole: PeftModel, prompts: Tensor) -> dict[str, Any]:
    whole.eval()
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompts),
        "max_new_tokens": NEW,
        "max_length": None,
    }
    options |= {"do_sample": False, "use_cache": True, "return_dict_in_generate": False}
    pad = whole.generation_config.pad_token_id
    ends = whole.generation_config.eos_token_id
    chosen = {"pad_token_id": 0} if pad is None else {}
    if ends is None:
        chosen["eos_token_id"] = ends = TOKENIZER.eos_token_id
    made = whole.generate(input_ids=prompts, **options, **chosen)[:, prompts.shape[1] :].tolist()
    last = set(ends if isinstance(ends, list) else [ends])
    lengths = [
        next((place for place, token in enumerate(row, 1) if token in last), len(row))
        for row in made
    ]
    return {str(row): one[: lengths[row]] for row, one in enumerate(made)}


def _loaded_values(loaded: Any) -> dict[str, Any]:
    return {"dtype": loaded.config.dtype} | dict(loaded.state_dict())
