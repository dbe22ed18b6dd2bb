"""Phases of a model whose code comes with it: what the first leaves is opened by the second."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ownmodel import Imports, imports_seen, write_own_model
from phaseruns import HALF, ROWS, STEP, plan_of, rows

from lema import LemaConfig
from lema.errors import LemaError
from lema.train.phases.run import run_phases


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imports]:
    with imports_seen(tmp_path, monkeypatch) as seen:
        yield seen


def test_code_goes_along_where_it_is_trusted_and_is_not_run_where_it_is_not(
    tmp_path: Path, imports: Imports
) -> None:
    shared = {"tokens": STEP, "mixture": HALF, "learning_rate": 1e-3}
    plan = plan_of(
        {"trains": "full", "name": "whole", **shared},
        {"trains": "lora", "name": "adapters", "lora_target_modules": ["grind", "sift"], **shared},
        {
            "trains": "lora",
            "name": "more",
            "merge": True,
            "lora_target_modules": ["grind"],
            **shared,
        },
    )
    assert plan.batch_size == ROWS
    sources = {"one": rows(1), "two": rows(2)}
    config = LemaConfig(
        str(write_own_model(tmp_path / "mill")), device="cpu", output_dir=str(tmp_path / "run")
    )
    imports.forget()
    with pytest.raises(LemaError, match="code"):
        run_phases(config, plan, sources)
    assert not imports.modules
    run_phases(config, plan, sources, trust_remote_code=True)
    for phase in ("whole", "adapters"):
        assert list((tmp_path / "run" / phase / "model").glob("modeling_*.py"))
