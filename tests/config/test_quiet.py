"""Warnings of libraries about kernels nobody asked for are kept back, and errors are not."""

import logging
from collections.abc import Iterator

import pytest

from lema.config.printing import CHATTY, hush, hushed


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in CHATTY]
    yield
    for logger, level in before:
        logger.setLevel(level)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    for name in CHATTY:
        logging.getLogger(name).warning("a warning")
        logging.getLogger(name).error("an error")
    return [record.message for record in caplog.records]


def test_only_errors_pass_inside_the_block(caplog: pytest.LogCaptureFixture) -> None:
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    with hushed():
        assert logged(caplog) == ["an error"] * len(CHATTY)
    assert "a warning" in logged(caplog)


def test_only_errors_pass_for_good(caplog: pytest.LogCaptureFixture) -> None:
    hush()
    assert logged(caplog) == ["an error"] * len(CHATTY)
