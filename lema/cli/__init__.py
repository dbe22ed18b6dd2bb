"""The command line: each verb reads its arguments and calls the library."""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.cli.app import main

__all__ = ["main"]

__getattr__, __dir__ = lazy_exports(__name__, {"main": "app"})
