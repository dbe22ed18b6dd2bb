"""Two processes of trainers that wrap the model in DistributedDataParallel: streamed, and whole
with PEFT.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from trlruns import NUM_LAYERS, recomputing, save

# What each kind of trainer is given: its arguments, and how the model is opened.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trainer": ({"gradient_accumulation_steps": 2}, {}),
    "sft": (
        {
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "evaluated": 6,
        },
        {},
    ),
    "dpo": (recomputing(False), {"gradient_checkpointing": False}),
    "kto": ({}, {}),
    "grpo": ({"num_generations": 4, "max_completion_length": 4, "beta": 0.1}, {}),
    "sft with embeddings": ({}, {"targets": {"modules_to_save": ["embed_tokens", "lm_head"]}}),
}
# What each kind is given where the batches of an optimizer step go through the layers together.
MIXED_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trainer": ({"gradient_accumulation_steps": 3}, {}),
    "sft": ({"gradient_accumulation_steps": 2}, {}),
    "dpo": ({"gradient_accumulation_steps": 2}, {}),
    "kto": ({"gradient_accumulation_steps": 2}, {}),
    "grpo": (
        {
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 4,
            "beta": 0.1,
        },
        {},
    ),
    "sft with embeddings": (
        {"gradient_accumulation_steps": 2},
        {"targets": {"modules_to_save": ["embed_tokens", "lm_head"]}},
    ),
}

WORK = f"""
import os, sys, warnings
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
import lema
from lema.errors import ConfigError
from lema.train.hf.reference import ReferenceMixin
from test_trl_grpo import GRPO, RecordedGRPO
from trlruns import KINDS, adapters, outcome, save, streamed_model, trainer_of, whole_model

KINDS["grpo"] = GRPO
KINDS["sft with embeddings"] = KINDS["sft"]
place, rank = Path(sys.argv[1]), os.environ["RANK"]
warnings.filterwarnings("ignore", message="gradients are accumulated")
made = {{
    "whole": lambda targets={{}}, **_: whole_model(place, **targets),
    "streamed": lambda targets={{}}, **settings: streamed_model(place, settings, **targets),
}}
found = {{}}
for kind, (arguments, settings) in {RUNS!r}.items():
    for way, make in made.items():
        trainer = trainer_of(kind, make(**settings), place / f"{{kind}}-{{way}}", max_steps=4, **arguments)
        losses, adapter = outcome(trainer)
        assert type(trainer.model_wrapped) is DistributedDataParallel
        told = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        found[f"{{kind}} {{way}}"] = losses, told, adapter
    if kind == "sft":
        again = trainer_of(kind, make(), place / "again", max_steps=4, **arguments)
        again.train(resume_from_checkpoint=str(place / "sft-streamed" / "checkpoint-2"))
        found["resumed"] = adapters(again.model)

class Compared(ReferenceMixin, RecordedGRPO): ...

model = streamed_model(place)
trainer = trainer_of("grpo", model, place / "compared", trainer=Compared, max_steps=4, **{RUNS["grpo"][0]!r})
losses, adapter = outcome(trainer)
found["grpo compared"] = losses, [], adapter

# Rows that are cut into micro-batches, whose gradients are sent once.
rows = torch.arange(4, 36).view(4, 8) + 7 * int(rank)
for way, make in made.items():
    model = make(micro_batch_size=2).train()
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        wrapped(input_ids=rows, labels=rows).loss.backward()
    found[f"wide {{way}}"] = {{name: one.grad for name, one in model.named_parameters() if one.requires_grad}}

tied = place / "tied"
with torch.random.fork_rng():
    save("llama", tied, tie_word_embeddings=True)
TIED = {{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}}

def refused(call):
    try:
        call()
    except ConfigError as error:
        return str(error)

# Batches of a step that go through the layers together, whose gradients are sent once.
MIXED = {{kind: type(f"Mixed{{kind}}", (lema.StreamingMixin, KINDS[kind][0]), {{}}) for kind in {MIXED_RUNS!r}}}
for kind, (arguments, settings) in {MIXED_RUNS!r}.items():
    for way, make in made.items():
        model = make(**settings)
        mixed = {{"trainer": MIXED[kind]}} if way == "streamed" else {{}}
        trainer = trainer_of(kind, model, place / f"mixed-{{kind}}-{{way}}", max_steps=4, **mixed, **arguments)
        losses, adapter = outcome(trainer)
        assert type(trainer.model_wrapped) is DistributedDataParallel
        if way == "streamed":
            found[f"mixed {{kind}} leases"] = model.opened.memory.counters.leases
        found[f"mixed {{kind}} {{way}}"] = losses, [], adapter

found["refused"] = [
    refused(lambda: streamed_model(place, {{"shard_weights": True}})),
    refused(lambda: streamed_model(place, {{"micro_batch_size": 1 + int(rank)}})),
    refused(lambda: trainer_of("sft", streamed_model(place), place / "mixed", trainer=MIXED["sft"], max_steps=1, gradient_accumulation_steps=2, ddp_find_unused_parameters=True).train()),
    refused(lambda: trainer_of("sft", streamed_model(tied, **TIED), place / "tied-mixed", trainer=MIXED["sft"])),
]
torch.save(found, place / f"found-{{rank}}.pt")
"""


# the first test waits for two processes that import all of TRL and train eleven times
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes has found."""
    place = save("llama", tmp_path_factory.mktemp("processes"))
    (place / "work.py").write_text(WORK)
    here = {
        "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"
    }
    done = run_processes([str(place / "work.py"), str(place)], 2, timeout=500, env=here)
    assert done.returncode == 0, done.stderr[-12000:]
    return [torch.load(place / f"found-{rank}.pt") for rank in range(2)]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", RUNS)
def test_two_processes_are_two_processes_with_the_whole_model(
    found: list[dict[str, Any]], kind: str
) -> None:
    for one in found:
        whole = one[f"{kind} whole"]
        streamed = one[f"{kind} streamed"]
        assert whole[:2] == streamed[:2]
        assert len(whole[1]) == (2 if kind == "sft" else 0)
        assert_equal(whole[2], streamed[2])
    # each has rows of its own
    assert found[0][f"{kind} streamed"][0] != found[1][f"{kind} streamed"][0]
    assert_equal(found[0][f"{kind} streamed"][2], found[1][f"{kind} streamed"][2])


def test_two_processes_compare_with_a_reference_in_the_pass_that_learns(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert one["grpo compared"][0] == one["grpo whole"][0]
        assert_equal(one["grpo compared"][2], one["grpo whole"][2])


@pytest.mark.parametrize("kind", MIXED_RUNS)
def test_batches_of_a_step_that_two_processes_run_together_are_accumulated_ones(
    found: list[dict[str, Any]], kind: str
) -> None:
    for one in found:
        whole = one[f"mixed {kind} whole"]
        mixed = one[f"mixed {kind} streamed"]
        assert whole[0] == mixed[0]
        assert_equal(whole[2], mixed[2])
        if kind == "sft":  # of four steps, and one lease to learn what a layer returns
            assert one[f"mixed {kind} leases"] == 4 * 2 * NUM_LAYERS + 1
    assert_equal(found[0][f"mixed {kind} streamed"][2], found[1][f"mixed {kind} streamed"][2])


def test_two_processes_go_on_from_their_checkpoint(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert_equal(one["resumed"], one["sft streamed"][2])


def test_gradients_of_micro_batches_are_sent_once(found: list[dict[str, Any]]) -> None:
    for one in found:
        whole = one["wide whole"]
        streamed = one["wide streamed"]
        assert whole.keys() == streamed.keys()
        for name, gradient in whole.items():
            assert float((gradient - streamed[name]).norm()) <= 1e-5 * float(gradient.norm()), name
    assert_equal(found[0]["wide streamed"], found[1]["wide streamed"])


def test_what_several_processes_cannot_do_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        sharded, unlike, searching, tied = one["refused"]
        assert "shard_weights" in sharded
        assert "micro_batch_size differ" in unlike
        assert "ddp_find_unused_parameters=False" in searching
        assert "one wide batch" in tied
