"""Whether this machine is ready: versions, limits, devices, link and disk, each with how to mend it.

`examine` looks at all of it. What only one kind of device has is told by the backends: an entry point of the group
`lema.doctors` names a function without arguments that returns an iterable of `Finding`.
"""

from lema.doctor.finding import Fact, Finding, Level
from lema.doctor.knownbad import Pair, Stub, installed_version, known_bad, stubs
from lema.doctor.report import Report, examine
from lema.doctor.show import show

__all__ = [
    "Fact",
    "Finding",
    "Level",
    "Pair",
    "Report",
    "Stub",
    "examine",
    "installed_version",
    "known_bad",
    "show",
    "stubs",
]
