"""`lema doctor`: whether this machine is ready (versions, limits, devices, disk), and how to mend what is not."""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.cli.doctor.report import Report, examine

__all__ = ["Report", "examine"]

__getattr__, __dir__ = lazy_exports(__name__, {"Report": "report", "examine": "report"})
