"""How threads that compute wait for each other: asleep, so that who else has work gets the
processor.

OpenMP's threads spin by default, on the assumption that nobody else wants the cores. Where somebody
does, those that spin take the time of those that they wait for.
"""

import os
from collections.abc import MutableMapping

__all__ = ["let_threads_sleep"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # by which a user says it


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have OpenMP's threads sleep while they wait, unless the environment says how they do;
    libraries read that once, when they are imported."""
    if not any(name in environment for name in WAITING):
        environment["OMP_WAIT_POLICY"] = "passive"
