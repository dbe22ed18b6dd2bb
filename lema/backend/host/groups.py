"""The control groups that a process is in (Linux), which limit what it may take; elsewhere there
are none.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["groups"]


def groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the control groups that this process is in, from its own up to
    the root.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            own_group = top / path.lstrip("/")
            # In a container the path is that of the host, and what is mounted is the container's
            # own group.
            yield from (
                group
                for group in (own_group, *own_group.parents)
                if group.is_relative_to(top) and group.is_dir()
            )
