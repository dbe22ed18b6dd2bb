"""What comes from outside is checked before it is used: the short forms of the faults in
`tests/faults`.

Each of these tests is itself tested: with a check taken out, the cases that it is there for are
seen to fail.
"""

import os
from pathlib import Path

import pytest

from faults import configkeys, inputs, paths, rows
from lema.data import load_rows
from lema.errors import DataError
from lema.storage import header
from lema.storage import index as weights
from lema.storage import modelfiles as companions


@pytest.mark.slow
def test_mutated_files_are_refused_by_name_or_change_nothing() -> None:
    outcome = inputs.run(400)
    assert outcome.failures == ()
    assert outcome.passed == outcome.cases == 400


def test_a_header_that_is_believed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "KINDS", {"headers": inputs.KINDS["headers"]})
    monkeypatch.setattr(header, "_check_coverage", lambda *_: None)
    assert "header: wrong accept" in "\n".join(inputs.run(150).failures)


def test_no_path_leads_out_of_a_models_directory() -> None:
    outcome = paths.run(len(paths.FORMS))
    assert outcome.failures == ()
    assert outcome.cases > 40


def test_a_link_that_is_followed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("weights: link", "shard: link", "tokenizer: link", "generation: link")
    monkeypatch.setattr(paths, "FORMS", {kind: paths.FORMS[kind] for kind in kinds})
    for module in (weights, companions):
        monkeypatch.setattr(module, "check_inside", lambda _: None)
    failed = [failure.partition(": opened")[0] for failure in paths.run(len(kinds)).failures]
    assert failed == list(kinds)


def test_broken_rows_are_named_by_file_and_line() -> None:
    outcome = rows.run(90)
    assert outcome.failures == ()
    assert outcome.cases >= 90


def test_a_row_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lema.data.columns._ints",
        lambda row, column: [int(one) for one in row.values[column] or [0]],
    )
    assert any("was taken" in failure for failure in rows.run(90).failures)


@pytest.mark.slow
def test_every_level_of_settings_is_refused_by_name_before_torch_is_imported() -> None:
    outcome = configkeys.run(150)
    assert outcome.failures == ()
    assert outcome.cases >= 150


def test_data_that_are_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        load_rows(tmp_path / "rows.jsonl")
