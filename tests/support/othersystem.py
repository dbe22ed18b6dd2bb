"""Lets LEMA's own modules meet a system like Windows and macOS: what either lacks is not there, on
Linux.

Libraries keep all that they have. Of what LEMA's modules do themselves, by whatever function of the
standard library: modules for Unix alone cannot be imported, and neither `os`, `signal`, `mmap`,
`ctypes` nor `multiprocessing` has what is not everywhere; `/proc` and control groups cannot be
opened; directories cannot be opened; a file that is open keeps its name, and so does the directory
it lies in; names take none that exists; links take a privilege; names have no characters that
Windows refuses; what is open to be read is not flushed. `msvcrt` locks files. The process that
renders chat templates meets the same system.

`watching/sitecustomize.py` calls `hide` in every process in whose environment OTHER_SYSTEM is set.
As a program, this file runs another one, and hides from that.
"""

import builtins
import errno
import os
import runpy
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

OURS = {"lema", "lema_accelerator", "lema_cpu", "lema_cuda", "lema_neuron", "lema_tools"}
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
SYSTEM = ("/proc", "/sys/fs/cgroup")
REFUSED = set('<>:"|?*\\') | set(map(chr, range(32)))
DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)),
}
HIDDEN = {
    "os": """
        O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOATIME O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE
        POSIX_FADV_DONTNEED SCHED_BATCH WNOHANG chown copy_file_range eventfd fchmod fchown fork forkpty
        fstatvfs get_blocking getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid
        getuid killpg lockf memfd_create mkfifo mknod nice openpty pidfd_open posix_fadvise posix_fallocate
        posix_spawn posix_spawnp pread preadv pwrite pwritev readv register_at_fork sched_getaffinity
        sched_setaffinity sendfile set_blocking setpgid setpriority setsid statvfs sync sysconf tcgetpgrp
        tcsetpgrp ttyname uname wait wait3 wait4 waitid writev
    """,
    "signal": """
        ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF
        SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIG_BLOCK SIG_SETMASK
        alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait
    """,
    "mmap": """
        MADV_DONTNEED MADV_HUGEPAGE MADV_WILLNEED MAP_ANON MAP_ANONYMOUS MAP_POPULATE MAP_PRIVATE MAP_SHARED
        PROT_EXEC PROT_READ PROT_WRITE
    """,
    "ctypes": "",
    "multiprocessing": "",
    "subprocess": "",
}


class System(ModuleType):
    """A module of the standard library as another system has it. What a test puts into the real
    one is seen.
    """

    def __init__(self, real: ModuleType, hidden: set[str], changed: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        vars(self).update(_real=real, _hidden=hidden, _changed=changed, _before=dict[str, Any]())

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self
            )
        return self._changed[name] if name in self._changed else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._before.setdefault(name, getattr(self._real, name))
        setattr(self._real, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._before:  # a test takes back what it put there
            setattr(self._real, name, self._before.pop(name))
        else:
            delattr(self._real, name)


def hide(ours: Callable[[Mapping[str, Any]], bool]) -> None:
    """Hide it from the modules that `ours` says of their globals."""
    import_ = builtins.__import__
    systems = dict[str, System]()

    def import_hidden(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        if level == 0 and globals is not None and ours(globals):
            if name in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name == "msvcrt":
                return console()
            if name in HIDDEN:
                if name not in systems:
                    systems[name] = System(import_(name), set(HIDDEN[name].split()), CHANGED[name])
                return systems[name]
        return import_(name, globals, locals, fromlist, level)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if (
            event in RULES
            and (caller := _caller(sys._getframe().f_back)) is not None
            and ours(caller.f_globals)
        ):
            RULES[event](*arguments)

    builtins.__import__ = import_hidden
    sys.addaudithook(audit)


def of_lema(module: Mapping[str, Any]) -> bool:
    """Say whether these are the globals of a module of LEMA's."""
    name = module.get("__name__") or ""
    return (module.get("__package__") or "" if name == "__main__" else name).partition(".")[
        0
    ] in OURS


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not of the standard library."""
    while (
        frame is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names
    ):
        if frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    return frame


def console() -> ModuleType:
    """Return `msvcrt` as far as LEMA uses it. A lock is of the whole file, where theirs is of a
    byte.
    """
    import fcntl

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module = ModuleType("msvcrt")
    module.LK_NBLCK = 2
    module.locking = locking
    return module


def _open(path: Any, flags: int, mode: int = 0o777, **how: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode, **how)


def _fsync(descriptor: int) -> None:
    import fcntl

    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(descriptor)


def _library(name: Any, *arguments: Any, **options: Any) -> Any:
    import ctypes

    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return ctypes.CDLL(name, *arguments, **options)


def _context(method: str | None = None) -> Any:
    import multiprocessing

    if method in ("fork", "forkserver"):
        raise ValueError(f"cannot find context for {method!r}")
    return multiprocessing.get_context(method)


def _started(command: Any, *arguments: Any, **options: Any) -> Any:
    import subprocess

    if isinstance(command, list) and command[1:3] == ["-I", "-S"]:  # to which no PYTHONPATH is told
        command = [*command[:3], __file__, *command[3:]]
    return subprocess.Popen(command, *arguments, **options)


CHANGED: dict[str, Mapping[str, Any]] = {
    "os": {"name": "nt", "open": _open, "fsync": _fsync},
    "signal": {},
    "mmap": {},
    "ctypes": {"CDLL": _library},
    "multiprocessing": {"get_context": _context},
    "subprocess": {"Popen": _started},
}


def _opened(path: Any, mode: str | None, flags: int) -> None:
    if isinstance(path, int):
        return
    name = os.fsdecode(path)
    if name.startswith(SYSTEM):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
    if flags & os.O_CREAT:
        _named(name)


def _named(path: Any, *_: Any) -> None:
    name = os.path.basename(os.fsdecode(path).rstrip("/"))
    if (
        set(name) & REFUSED
        or name.partition(".")[0].lower() in DEVICES
        or name.endswith((" ", "."))
    ):
        raise OSError(
            errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect", name
        )


def _renamed(source: Any, target: Any, source_in: int, target_in: int) -> None:
    _named(target)
    there = [os.path.abspath(os.fsdecode(path)) for path in (source, target)]
    _kept(there[0], there[1])
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name not in ("rename", "replace", "move"):
        frame = frame.f_back
    if os.path.lexists(there[1]) and (os.path.isdir(there[1]) or frame.f_code.co_name == "rename"):
        raise FileExistsError(
            errno.EEXIST, "Cannot create a file when that file already exists", there[1]
        )


def _removed(path: Any, directory: int) -> None:
    name = os.fsdecode(path)
    if directory >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
    _kept(os.path.abspath(name))


def _kept(*paths: str) -> None:
    """Refuse where a file is open, or mapped, that has one of these names or lies below one."""
    for place in _open_files():
        for path in paths:
            if place == path or place.startswith(f"{path}/"):
                what = (
                    "The process cannot access the file because it is being used by another process"
                )
                raise PermissionError(errno.EACCES, what, place)


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISREG(os.fstat(int(number)).st_mode):
                yield os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        yield from {line.rstrip("\n").split(maxsplit=5)[5] for line in maps if line.count("/")}


def _linked(source: Any, target: Any, directory: int) -> None:
    raise OSError(
        errno.EINVAL, "A required privilege is not held by the client", os.fsdecode(target)
    )


RULES: dict[str, Callable[..., None]] = {
    "open": _opened,
    "os.mkdir": _named,
    "os.rename": _renamed,
    "os.remove": _removed,
    "os.symlink": _linked,
}

if __name__ == "__main__":
    del sys.argv[0]
    program = sys.argv[0]
    hide(lambda module: module.get("__name__") == "__main__" and module.get("__file__") == program)
    runpy.run_path(program, run_name="__main__")
