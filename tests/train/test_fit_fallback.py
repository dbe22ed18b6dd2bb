"""A run goes on from the newest checkpoint that is sound, and ends where the run does that was
not stopped.
"""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from smallrun import adapter_of, logged, opened, run_fit, same, settings, token_rows
from torch import Tensor

from lema import LemaConfig
from lema.backend import Alone
from lema.backend.group import first_alone
from lema.data import Batches
from lema.errors import AdapterError, ConfigError
from lema.train.checkpoint.resume import newest_sound

ROWS = token_rows(24)


def config_of(llama: Path, out: Path, **changes: Any) -> LemaConfig:
    return settings(llama, out, **{"save_steps": 2, "lora_dropout": 0.1, "max_steps": 6, **changes})


@pytest.fixture(scope="module")
def straight(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """Where a run that was not stopped has left three checkpoints, and its adapter."""
    out = tmp_path_factory.mktemp("straight")
    return out, run_fit(config_of(llama, out), ROWS)[1]


@pytest.fixture
def copied(straight: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(straight[0], tmp_path / "run"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def swap(file: Path) -> None:
    shutil.copy(file.parent.with_name("checkpoint-4") / file.name, file)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, "adapter_model.safetensors"),
        (swap, "optimizer.safetensors"),
        (Path.unlink, "optimizer.safetensors"),
        (truncate, "state.json"),
        (zero, "trainer_state.json"),
        (Path.unlink, "manifest.json"),
    ],
)
def test_from_an_older_checkpoint_it_ends_bitwise_as_if_nothing_had_been_damaged(
    llama: Path,
    straight: tuple[Path, dict[str, Tensor]],
    copied: Path,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    whole, expected = straight
    damage(copied / "checkpoint-6" / name)
    config = config_of(llama, copied)
    said = list[str]()
    assert same(run_fit(config, ROWS, resume=True, say=said.append)[1], expected)
    assert (
        len(said) == 2
        and str(copied / "checkpoint-6" / name) in said[0]
        and "passed over" in said[0]
    )
    assert said[1] == f"resuming from {copied / 'checkpoint-4'} (step 4 of 6)"
    # what was damaged is replaced
    for file in (
        "adapter_model.safetensors",
        "optimizer.safetensors",
    ):
        assert (copied / "checkpoint-6" / file).read_bytes() == (
            whole / "checkpoint-6" / file
        ).read_bytes()
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    # each step once, and the summary
    assert [line["step"] for line in lines] == [
        1,
        2,
        3,
        4,
        5,
        6,
        6,
    ]
    assert logged(config) == logged(config_of(llama, whole))


@pytest.mark.slow
def test_several_damaged_ones_are_each_said(
    llama: Path, straight: tuple[Path, dict[str, Tensor]], copied: Path
) -> None:
    flip(copied / "checkpoint-6" / "adapter_model.safetensors")
    flip(copied / "checkpoint-4" / "optimizer.safetensors")
    said: list[str] = []
    assert same(
        run_fit(config_of(llama, copied), ROWS, resume=True, say=said.append)[1], straight[1]
    )
    assert ["checkpoint-6" in said[0], "checkpoint-4" in said[1], "checkpoint-2" in said[2]] == [
        True,
        True,
        True,
    ]


def test_a_run_none_of_whose_checkpoints_is_sound_does_not_begin_afresh(
    llama: Path, copied: Path
) -> None:
    for step in (2, 4, 6):
        flip(copied / f"checkpoint-{step}" / "state.json")
    for resume, kind, words in (
        (True, AdapterError, "no checkpoint is valid"),
        (False, ConfigError, "earlier run"),
    ):
        with pytest.raises(kind, match=words):
            run_fit(config_of(llama, copied), ROWS, resume=resume)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this run may learn nothing")
def test_without_its_optimizer_a_checkpoint_is_gone_on_from_only_where_that_is_asked_for(
    llama: Path, straight: tuple[Path, dict[str, Tensor]], copied: Path
) -> None:
    (copied / "checkpoint-6" / "optimizer.safetensors").unlink()
    later = config_of(llama, copied, max_steps=7, learning_rate=0.0)
    said: list[str] = []
    with opened(later) as model:
        trainer = model.get_trainer()
        trainer.fit(ROWS, resume=True, weights_only=True, say=said.append)
        assert (trainer.global_step, same(adapter_of(model.skeleton), straight[1])) == (7, True)
        assert trainer.optimizer is not None
        steps = {int(state["step"]) for state in trainer.optimizer.state_dict()["state"].values()}
    assert steps == {1}  # of the one that was taken since
    assert said[:2] == [
        f"resuming from {copied / 'checkpoint-6'} (step 6 of 7)",
        (
            "LEMA takes the weights of this checkpoint but not its optimizer, whose moments "
            "begin empty"
        ),
    ]
    with pytest.raises(ConfigError, match="weights_only needs a checkpoint"):
        run_fit(config_of(llama, copied / "new"), ROWS, weights_only=True)


@pytest.mark.slow
def test_what_may_change_is_what_the_next_step_goes_by(llama: Path, copied: Path) -> None:
    later = config_of(
        llama,
        copied,
        max_steps=8,
        learning_rate=0.5,
        weight_decay=0.25,
        adam_beta1=0.5,
        lr_scheduler_type="constant",
    )
    said: list[str] = []
    with opened(later) as model:
        trainer = model.get_trainer()
        trainer.fit(ROWS, resume=True, say=said.append)
        assert trainer.optimizer is not None
        (group,) = trainer.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.25, (0.5, 0.999))
    rates = logged(later, "learning_rate")
    assert (rates[7], rates[8]) == (0.5, 0.5)
    named = [one.partition(":")[0] for one in said[1].partition("now): ")[2].split("; ")]
    assert sorted(named) == [
        "adam_beta1",
        "learning_rate",
        "lr_scheduler_type",
        "max_steps",
        "weight_decay",
    ]


class Counted(list[dict[str, list[int]]]):
    """Rows that count how often each was asked for."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        super().__init__(rows)
        self.asked: Counter[int] = Counter()

    def __getitem__(self, index: Any) -> Any:
        self.asked[index] += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def test_no_row_of_a_step_that_was_taken_is_read_again(llama: Path, copied: Path) -> None:
    shutil.rmtree(copied / "checkpoint-6")
    rows = Counted(ROWS)
    config = config_of(llama, copied)
    run_fit(config, rows, resume=True, say=lambda _: None)
    batches = Batches(ROWS, config.batch_size, config.seed)
    # to see what the rows are, and in what they end
    looked_at = Counter([0, 0]) + Counter(range(len(ROWS)))
    assert rows.asked == looked_at + Counter(row for step in (4, 5) for row in batches.rows(step))


@contextmanager
def processes(count: int) -> Iterator[list[Any]]:
    """As many processes as far as their words go, each a thread."""
    barrier = threading.Barrier(count)
    given = [None] * count

    class One(Alone):
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.size = count
            self.num_processes = count
            self.first = rank == 0  # type: ignore[misc]

        def everyone(self, value: Any) -> list[Any]:
            given[self.rank] = value
            barrier.wait(timeout=60)
            found = list(given)
            barrier.wait(timeout=60)
            return found

    yield [One(rank) for rank in range(count)]


def test_all_processes_go_on_from_what_the_first_has_found(copied: Path) -> None:
    """A disk that several machines see may be behind in one of them."""
    flip(copied / "checkpoint-6" / "state.json")
    seen = {0: [2, 4, 6], 1: [2]}
    found: dict[int, Any] = {}

    def look(one: Any, steps: list[int]) -> None:
        paths = [copied / f"checkpoint-{step}" for step in steps]
        try:
            found[one.rank] = first_alone(one, lambda: newest_sound(paths, lambda _: None))
        except AdapterError as error:
            found[one.rank] = error.what.splitlines()[0]

    for expected in (copied / "checkpoint-4", "no checkpoint is valid:"):
        with processes(2) as all_of_them:
            threads = [
                threading.Thread(target=look, args=(one, seen[one.rank])) for one in all_of_them
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == {0: expected, 1: expected}
        seen[0] = [6]
