"""The settings of a tiny run of phases, on a disk that is not waited for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tiny import Checkpoint

    from lema import LemaConfig


@pytest.fixture(scope="session")
def _libraries() -> None:
    """Import them, and have the collection between phases leave alone what they have made for
    good.
    """
    import lema.train.phases.run

    assert lema.train.phases
    gc.freeze()


@pytest.fixture
def config_of(
    tmp_path: Path,
    checkpoint_of: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    _libraries: None,
) -> Callable[..., LemaConfig]:
    """Return the settings of a run in a directory of that name: `(name="run", dropout=0.0,
    **settings)`.
    """
    from lema import LemaConfig
    from lema.storage import atomic as commit

    # a loss of power is not what is tested here
    monkeypatch.setattr(commit, "flush", lambda _: None)

    def make(name: str = "run", dropout: float = 0.0, **settings: Any) -> LemaConfig:
        fixed = {
            "device": "cpu",
            "gradient_checkpointing": True,
            "save_steps": 1,
            "max_grad_norm": 1.0,
        }
        streamed = checkpoint_of("llama", dropout=dropout).streamed
        return LemaConfig(str(streamed), output_dir=str(tmp_path / name), **{**fixed, **settings})

    return make
