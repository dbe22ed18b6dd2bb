"""All tests of this folder run on the second device, in processes that know it."""

import os
from pathlib import Path

import pytest
import seconddevice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, which run apart from the others."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.seconddevice)


@pytest.fixture(scope="session", autouse=True)
def second() -> seconddevice.SecondDevice:
    """The device. Where nothing compiles it, its tests are skipped, but not in continuous integration."""
    try:
        return seconddevice.install()
    except seconddevice.NoCompiler as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
