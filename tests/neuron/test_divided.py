"""Divided among 2 and 4 processes, streamed layers give what one process gives; each reads its
part of them only.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from dividedwork import MODELS, SHAPE, cases, main, reference, write_models
from forked import run_forked
from safetensors import safe_open

# The first test waits for two or six processes' work on two cores. No test is in a class, because a
# class would go to another process, which would have the work done again.
pytestmark = [pytest.mark.slow, pytest.mark.whole, pytest.mark.timeout(900)]
MORE = pytest.mark.exhaustive
IN_A_SESSION = ("int8", "nf4", "experts stored one by one")


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    here = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    asked = [item.callspec.params for item in here]
    names = {str(one["case"]) for one in asked if "case" in one}
    names |= {f"looked at {one['shared']}" for one in asked if "shared" in one}
    directory = tmp_path_factory.mktemp("divided")
    write_models(directory)
    measured: dict[int, dict[str, Any]] = {1: reference(directory, names)}
    for size in sorted({2, *(one.get("size", 2) for one in asked)}):
        run_forked(main, [directory, names], size, directory, 500)
        measured[size] = json.loads((directory / f"found {size}.json").read_text())
    measured[0] = {model: sizes_of(directory / model / "model.safetensors") for model in MODELS}
    return measured


def sizes_of(file: Path) -> dict[str, int]:
    """Bytes of each tensor of a layer, by its name in there."""
    with safe_open(file, "pt") as tensors:
        names = [name for name in tensors.keys() if ".layers.3." in name]  # noqa: SIM118 - it has no iterator
        return {name.partition(".layers.3.")[2]: tensors.get_tensor(name).nbytes for name in names}


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(
            size,
            str(case),
            marks=MORE if size == 4 or (number > 2 and case.model not in IN_A_SESSION) else (),
        )
        for size in (2, 4)
        for number, case in enumerate(cases(size))
    ],
)
def test_several_processes_give_what_one_gives(
    found: dict[int, dict[str, Any]], size: int, case: str
) -> None:
    for rank in found[size][case]:
        assert isinstance(rank, dict), rank
        assert all(rank[kind] < 1e-5 for kind in ("gradient", "losses", "loss after")), rank
        assert rank.get("logits", 0.0) < 1e-5, rank
        assert rank["after"] < 1e-4 and rank["norm"] < 1e-4, rank  # after three steps
        assert rank["taken over"] < 1e-4, rank
        assert rank.get("tokens", 0) == 0, rank


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=MORE)])
def test_a_process_reads_its_part_of_what_is_divided(
    found: dict[int, dict[str, Any]], size: int
) -> None:
    for case in cases(size):
        if case.settings or str(case) not in found[size]:
            continue
        sizes = found[0][case.model]
        kv = MODELS[case.model][1]["num_key_value_heads"]
        copies = max(1, size // kv)
        part = {"k_proj": copies / size, "v_proj": copies / size, "gate": 1.0}
        held = sum(
            nbytes
            if name.split(".")[-2].endswith("norm")
            else nbytes * part.get(name.split(".")[-2], 1 / size)
            for name, nbytes in sizes.items()
        )
        whole = found[1][str(case)]
        for rank in found[size][str(case)]:
            assert rank["read"] / whole["read"] == held / sum(sizes.values()), str(case)
        # Of the words each has its part, the last one what is left; the norm is whole.
        row = (
            4
            * SHAPE["hidden_size"]
            * (1 if MODELS[case.model][1].get("tie_word_embeddings") else 2)
        )
        words = SHAPE["vocab_size"]
        norm = 4 * SHAPE["hidden_size"]
        each = -(-words // size)
        assert whole["outside"] == row * words + norm
        parts = [row * min(each, words - rank * each) + norm for rank in range(size)]
        assert [rank["outside"] for rank in found[size][str(case)]] == parts, str(case)


shared_or_not = pytest.mark.parametrize(
    "shared", [pytest.param(False, id="tokens"), pytest.param(True, id="sequence", marks=MORE)]
)


@shared_or_not
def test_where_settings_leave_memory_to_the_backend_all_layers_stay_if_they_fit(
    found: dict[int, dict[str, Any]], shared: bool
) -> None:
    for rank in looked_at(found, shared):
        assert rank["stays"] > 0
        assert rank["read"][1] == 0


@shared_or_not
def test_a_step_takes_what_a_plan_told_without_the_processes(
    found: dict[int, dict[str, Any]], shared: bool
) -> None:
    for rank in looked_at(found, shared):
        assert 0.9 * rank["peak"] <= rank["told"] <= 1.1 * rank["peak"]


@shared_or_not
def test_a_step_exchanges_what_a_plan_told_without_the_processes(
    found: dict[int, dict[str, Any]], shared: bool
) -> None:
    for rank in looked_at(found, shared):
        assert rank["exchanged"] == rank["told exchanged"]
        if not shared:  # else the collectives that are missing in gloo are others that send more
            assert rank["exchanged"] == [len(rank["sent"]), sum(rank["sent"])]


@shared_or_not
def test_processes_draw_the_same_text_or_say_why_not(
    found: dict[int, dict[str, Any]], shared: bool
) -> None:
    one, other = looked_at(found, shared)
    assert one["refused"] == other["refused"] == ("sequence_parallel" if shared else "")
    assert one["sampled"] == other["sampled"]


def looked_at(found: dict[int, dict[str, Any]], shared: bool) -> list[dict[str, Any]]:
    ranks = found[2][f"looked at {shared}"]
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    return list(ranks)
