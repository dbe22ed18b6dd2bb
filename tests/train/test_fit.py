"""A run over a data set: the numbers of a loop over the whole model, what is written, what ends
it.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from smallrun import (
    NUM_LAYERS,
    adapter_of,
    logged,
    opened,
    run_fit,
    same,
    settings,
    token_rows,
    whole_model,
    write_model,
)
from transformers import (
    AutoModelForCausalLM,
    get_scheduler,
)

from lema import LemaConfig
from lema.data import Batches, prepare_data
from lema.engine.schedules import factor_of, spans_of
from lema.errors import ConfigError, DataError, NonFiniteError
from lema.stream.schedule import fetched, training_order
from lema.train.run import load_data


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("gpt2"), "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1
    )


def whole_loop(
    model: Any, config: LemaConfig, rows: Any, num_steps: int, warmup: int
) -> list[tuple[float, float, int]]:
    """Train the whole model by hand, over the same batches; return loss, learning rate and
    trained tokens by step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup, num_steps)
    batches = Batches(rows, config.batch_size, config.seed)
    found = []
    for step in range(num_steps):
        first = step * config.gradient_accumulation_steps
        last = min(first + config.gradient_accumulation_steps, batches.steps_per_epoch)
        parts = batches.micro_batches(range(first, last))
        tokens = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        total = 0.0
        for part in parts:
            loss = model(**part, num_items_in_batch=tokens).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        found.append((total, schedule.get_last_lr()[0], tokens))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def test_a_run_is_a_loop_over_the_whole_model(llama: Path, tmp_path: Path) -> None:
    rows = token_rows(18)  # five batches: two full steps and one of a single batch, itself not full
    config = settings(
        llama,
        tmp_path / "out",
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_ratio=0.4,
    )
    with opened(config) as model:
        model.save_pretrained(tmp_path / "start")
        result = model.get_trainer().fit(rows)
        streamed = adapter_of(model.skeleton)
    base = AutoModelForCausalLM.from_pretrained(llama)
    whole = PeftModel.from_pretrained(base, str(tmp_path / "start"), is_trainable=True).train()
    steps = whole_loop(whole, config, rows, 3, warmup=2)
    assert same(streamed, adapter_of(whole))
    assert list(logged(config).values()) == pytest.approx([loss for loss, _, _ in steps], rel=1e-6)
    assert list(logged(config, "learning_rate").values()) == [rate for _, rate, _ in steps]
    assert steps[0][1] == 0.0 < steps[1][1]
    assert len({tokens for _, _, tokens in steps}) == 3
    mean = sum(loss * tokens for loss, _, tokens in steps) / sum(tokens for _, _, tokens in steps)
    assert result["train_loss"] == pytest.approx(mean, rel=1e-6)
    assert set(result) == {"train_loss", "train_runtime", "train_tokens_per_second"}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_evaluation_is_the_whole_model_s_mean_over_trained_tokens(
    llama: Path, micro_batch_size: int | None, tmp_path: Path
) -> None:
    rows = token_rows(7)
    with opened(settings(llama, tmp_path, micro_batch_size=micro_batch_size)) as model:
        model.save_pretrained(tmp_path / "adapter")
        found = model.get_trainer().evaluate(rows)
    whole = whole_model(llama, tmp_path / "adapter")
    total = 0.0
    tokens = 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            labels = torch.tensor([row["labels"]])
            count = int((labels[:, 1:] != -100).sum())
            total = total + float(whole(input_ids=ids, labels=labels).loss) * count
            tokens = tokens + count
    assert found["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert found["eval_tokens"] == tokens


@pytest.mark.slow
def test_evaluating_on_the_way_changes_nothing(gpt2: Path, tmp_path: Path) -> None:
    config = settings(gpt2, tmp_path / "one", lora_dropout=0.1)
    evaluated = config.model_copy(update={"eval_steps": 2})
    result, with_evaluation = run_fit(evaluated, token_rows(16), token_rows(5, seed=2))
    _, without = run_fit(
        config.model_copy(update={"output_dir": str(tmp_path / "two")}), token_rows(16)
    )
    assert same(with_evaluation, without)
    assert list(logged(config, "eval_loss")) == [2, 4]
    assert logged(config, "eval_loss")[4] == result["eval_loss"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 2),
        ({"num_train_epochs": 2.0}, 3),
        ({"num_train_epochs": 0.5}, 1),
        ({"max_steps": 7}, 7),
        ({"max_steps": 2, "num_train_epochs": 9.0}, 2),
        ({"gradient_accumulation_steps": 1}, 3),
    ],
)
def test_epochs_or_steps_say_how_long_a_run_is(
    llama: Path, changes: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    config = settings(llama, tmp_path / "out", **{"gradient_accumulation_steps": 2, **changes})
    run_fit(config, token_rows(10))  # three batches of 4, 4 and 2 rows
    assert list(logged(config)) == list(range(1, steps + 1))
    batches = (
        steps * config.gradient_accumulation_steps
        if config.max_steps
        else round(config.num_train_epochs * 3)
    )
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["epoch"] == pytest.approx(batches / 3)


@pytest.mark.slow
@pytest.mark.picture
def test_metrics_have_a_row_per_step_and_a_picture(llama: Path, tmp_path: Path) -> None:
    config = settings(
        llama, tmp_path / "out", gradient_accumulation_steps=2, micro_batch_size=1, logging_steps=2
    )
    rows = token_rows(32)
    run_fit(config, rows, token_rows(3))
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["epoch"]) for line in lines] == [
        (2, 0.5),
        (4, 1.0),
        (4, 1.0),
        (4, 1.0),
    ]
    assert [line["type"] for line in lines] == ["train", "train", "eval", "summary"]
    assert set(lines[0]) == {
        "type",
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "time",
        "num_tokens",
        "tokens_per_second",
        "bytes_read",
        "bytes_uploaded",
        "bytes_gathered",
        "bytes_offloaded",
        "layers_read",
        "layers_kept",
        "seconds_blocked_disk",
        "seconds_blocked_upload",
        "seconds_blocked_compute",
        "seconds_blocked_gather",
        "seconds_expanding",
        "seconds_optimizer",
        "seconds_passed",
        "memory",
    }
    # of step 2, not of step 3
    assert lines[0]["learning_rate"] == pytest.approx(config.learning_rate * 3 / 4)
    assert "eval_loss" in lines[2]
    assert "train_loss" in lines[3]
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_weights_are_read_once_per_pass_for_all_batches_of_a_step(
    llama: Path, tmp_path: Path
) -> None:
    rows = token_rows(16)
    found = {}
    for accumulated, size, micro in ((1, 16, None), (4, 4, 1)):
        config = settings(
            llama,
            tmp_path / str(accumulated),
            gradient_accumulation_steps=accumulated,
            batch_size=size,
            micro_batch_size=micro,
            num_train_epochs=3.0,
        )
        with opened(config) as model:
            layers = [layer.nbytes for layer in model.memory.layers]
            before = model.memory.counters.bytes_read
            model.get_trainer().fit(rows)
            counters = model.memory.counters
        # Up all layers and down all but those that a turn finds in the slots.
        assert counters.layers_read == len(
            fetched(training_order(NUM_LAYERS) * 3, model.memory.num_slots)
        )
        assert (
            counters.layers_read + counters.layers_kept
            == counters.leases
            == 3 * (2 * NUM_LAYERS - 1)
        )
        assert sum(logged(config, "layers_read").values()) == counters.layers_read
        assert sum(logged(config, "bytes_read").values()) == counters.bytes_read - before
        found[accumulated] = counters.bytes_read - before
        assert found[accumulated] <= 3 * (2 * sum(layers) - layers[-1])
    assert found[1] == found[4]


def test_tensorboard_gets_the_loss(llama: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as events

    config = settings(llama, tmp_path / "out", report_to="tensorboard", run_name="mine")
    run_fit(config, token_rows(8), token_rows(2))
    (file,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    accumulator = events.EventAccumulator(str(file))
    accumulator.Reload()
    found = {event.step: event.value for event in accumulator.Scalars("train/loss")}
    assert found == pytest.approx(logged(config))
    assert [event.step for event in accumulator.Scalars("eval/loss")] == [2]


@pytest.mark.parametrize(
    ("name", "words"), [("tensorbord", "tensorbord is not supported"), ("flyte", "flytekit")]
)
def test_a_report_that_cannot_be_made_is_refused(
    llama: Path, name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run_fit(settings(llama, tmp_path / "out", report_to=[name]), token_rows(4))
    assert caught.value.where == f"report_to: {name}"
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_names_step_rows_and_layer_and_keeps_what_was_saved(
    llama: Path, tmp_path: Path
) -> None:
    rows = token_rows(12)
    config = settings(llama, tmp_path / "out", shuffle=False, save_steps=1)
    with opened(config) as model:
        module = model.skeleton.get_submodule("model.layers.4.self_attn.o_proj.lora_B.default")
        # From the third batch on, whose rows alone have this token.
        token = next(
            t for t in rows[8]["input_ids"] if not any(t in row["input_ids"] for row in rows[:8])
        )
        seen: list[bool] = []
        model.skeleton.get_input_embeddings().register_forward_hook(
            lambda _, args, out: seen.append(bool((args[0] == token).any()))
        )
        module.register_forward_hook(lambda _, args, out: out * torch.nan if True in seen else out)
        with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
            model.get_trainer().fit(rows)
    assert caught.value.where == (
        "step 3, rows [8, 9, 10, 11] of the data; the optimizer made no step; first "
        "non-finite output: model.layers.4"
    )
    assert list(logged(config)) == [1, 2]
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    whole_model(llama, tmp_path / "out" / "checkpoint-2")


def test_no_data_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        run_fit(settings(llama, tmp_path / "out"), [])


def test_a_plain_run_follows_a_schedule_that_transformers_does_not_have(
    llama: Path, tmp_path: Path
) -> None:
    config = settings(
        llama,
        tmp_path,
        lr_scheduler_type="wsds",
        warmup_steps=1,
        max_steps=4,
        report_to=["tensorboard"],
    )
    run_fit(config, token_rows(8))
    factor = factor_of("wsds", 4, spans_of("wsds", 4, warmup=1))
    assert list(logged(config, "learning_rate").values()) == [
        config.learning_rate * factor(step) for step in range(4)
    ]


def test_rows_that_are_no_tokens_are_tokenised_as_files_are(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of messages or texts, or a generator, trains as the data set that `prepare_data`
    makes of it.
    """
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"the mill {n}"},
                {"role": "assistant", "content": "is old"},
            ],
            "id": n,
        }
        for n in range(6)
    ]
    config = settings(llama, tmp_path / "a", batch_size=2)
    with opened(config) as model:
        tokens = prepare_data(chats, model.tokenizer, max_length=128)
    expected, adapter = run_fit(config, tokens, tokens)
    assert "messages" not in capsys.readouterr().out
    other = config.model_copy(update={"output_dir": str(tmp_path / "b")})
    result, found = run_fit(other, chats, iter(chats))
    assert (
        result["train_loss"] == expected["train_loss"]
        and result["eval_loss"] == expected["eval_loss"]
    )
    assert all(torch.equal(found[name], value) for name, value in adapter.items())
    assert (
        "LEMA does not use the column 'id' (6 rows, the first is rows:1)" in capsys.readouterr().out
    )
    with opened(other) as model:
        assert model.get_trainer().evaluate(chats)["eval_tokens"] == tokens.counts.trained_tokens
        with pytest.raises(DataError, match="say nothing to train on"):
            model.get_trainer().fit([{"words": "the mill"}])


def test_shares_are_held_by_a_fit_of_their_data_sets_and_refused_of_other_rows(
    llama: Path, tmp_path: Path
) -> None:
    """`mixture` is obeyed where `fit` is given the data sets of the config, and never passed
    over in silence.
    """
    files = {}
    for name, count in (("few", 2), ("all", 6)):
        files[name] = str(tmp_path / f"{name}.jsonl")
        rows = [json.dumps({"text": f"{name} mill {number}"}) for number in range(count)]
        Path(files[name]).write_text("\n".join(rows))
    mixed = settings(
        llama, tmp_path / "a", train_data=files, mixture={"few": 0.5, "all": 0.5}, max_steps=3
    )
    expected, adapter = run_fit(mixed, mixed.train_data)
    with opened(mixed) as model:
        prepared = load_data(model)[0]
    assert prepared.counts.rows == 12
    for out, given in (("b", dict(files)), ("c", prepared)):
        found, same_adapter = run_fit(
            mixed.model_copy(update={"output_dir": str(tmp_path / out)}), given
        )
        assert found["train_loss"] == expected["train_loss"] and same(adapter, same_adapter)
    refused = mixed.model_copy(update={"output_dir": str(tmp_path / "d")})
    for given in (files["all"], list(files.values()), token_rows(8)):
        with pytest.raises(ConfigError, match="it gives shares to the data sets"):
            run_fit(refused, given)
