"""A file system of few bytes (tmpfs, in a namespace of its own): the kernel itself says that it
is full.
"""

import ctypes
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from faults import forked
from faults.fulldisk import HALTED, LIMITS, REQUIRED, fault_after
from faults.outcome import Outcome
from faults.shortrun import ShortRun, short_run

__all__ = ["run"]

FAULT = "a file system (tmpfs) is full after N bytes"
SPACES = 0x10000000 | 0x00020000  # a user's namespace, and one of mounts
REMOUNT = 32
PAGE = 4096
PAGES = 120  # more than two saves and the adapter take
REFUSED = "this user may not mount"
AMPLE = 256 << 20
# every so many sizes, the file system says how much is left, and not that there is plenty
SAYING = 5


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Fill it at `count` sizes; none, and that is said, where this user may not mount one."""
    began = time.monotonic()
    failures = []
    made = short_run()
    straight = made.straight(**LIMITS)
    before = made.halted(HALTED, **LIMITS)
    told_to = made.place / "smalldisk.txt"
    for case in range(count):
        room = (case * PAGES // max(1, count - 1) + seed) * PAGE
        says_so = case % SAYING == SAYING - 1
        made.forget("cut")
        told_to.write_text("it did not come to its end", encoding="utf-8")

        def work(room: int = room, says_so: bool = says_so) -> int:
            told_to.write_text(_case(made, straight, before, room, says_so), encoding="utf-8")
            return 0

        ended = forked.run(work, made.log("mounted"), 4 * forked.PATIENCE)
        if ended.code == forked.CRASHED and REFUSED in ended.said:
            return Outcome(
                f"{FAULT} (not done: {REFUSED} one)", REQUIRED, 0, 0, (), time.monotonic() - began
            )
        fault = told_to.read_text(encoding="utf-8")
        told = f"{room} bytes left{', and the file system says so' if says_so else ''}"
        if fault:
            failures.append(f"{told}: {fault}")
        if report is not None:
            report(f"small disk {case + 1}/{count}, {told}{': ' + fault if fault else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _case(made: ShortRun, straight: Path, before: Path, room: int, says_so: bool) -> str:
    out = made.out("cut")
    out.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    user = os.getuid()
    group = os.getgid()

    def mount(flags: int, nbytes: int) -> None:
        if libc.mount(b"tmpfs", os.fsencode(out), b"tmpfs", flags, f"size={nbytes}".encode()):
            raise RuntimeError(f"{REFUSED}: {os.strerror(ctypes.get_errno())}")

    if libc.unshare(SPACES):
        raise RuntimeError(f"{REFUSED}: {os.strerror(ctypes.get_errno())}")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    mount(0, AMPLE)
    shutil.copytree(before, out, dirs_exist_ok=True)
    found = os.statvfs(out)
    mount(REMOUNT, (found.f_blocks - found.f_bfree) * found.f_frsize + room)

    def work() -> int:
        if not says_so:
            os.statvfs = _plenty  # as it is with quotas
        return made.train("cut", resume=True, **LIMITS)

    return fault_after(
        made, forked.run(work, made.log("cut")), straight, lambda: mount(REMOUNT, AMPLE)
    )


def _plenty(path: object) -> os.statvfs_result:
    return os.statvfs_result((PAGE, PAGE, *[1 << 30] * 6, 0, 255))
