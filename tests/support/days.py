"""The day that chat templates are told."""

import datetime as clocks
from typing import Any

import pytest
import transformers.utils.chat_template_utils as rendering


def set_day(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Let the clock that `transformers` gives to templates show this day."""

    class Moved(clocks.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Moved":
            return cls.fromisoformat(day)

    monkeypatch.setattr(rendering, "datetime", Moved)
