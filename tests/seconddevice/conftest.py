"""All tests of this folder run on the second device, in processes that know it."""

import json
import os
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import seconddevice

FOLDER = Path(__file__).parent
DISTANCES: dict[str, float] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, which run apart from the others."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.seconddevice)


@pytest.fixture(scope="session", autouse=True)
def second() -> seconddevice.SecondDevice:
    """The device."""
    seconddevice.built_or_skipped()
    return seconddevice.install()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect how far the steps of each type are apart."""
    if report.when == "call":
        DISTANCES.update(value for name, value in report.user_properties if name == "distance")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table of all types, where the environment asks for it."""
    file = os.environ.get("SECOND_DEVICE_TABLE")
    if file is None or hasattr(session.config, "workerinput"):
        return
    versions = [
        f"{package} {version(package).partition('+')[0]}"
        for package in ("transformers", "peft", "torch")
    ]
    table = {
        "date": f"{date.today()}",
        "versions": ", ".join(versions),
        "distances": dict(sorted(DISTANCES.items())),
    }
    Path(file).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
