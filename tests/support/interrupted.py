"""A command line that is sent a signal as it comes to a function: `python interrupted.py SIGINT
PLACE STUCK lema ...`.

PLACE is `module:name`. The signal goes to the command's process, also where the function is called
in a worker of it. With STUCK "1" the function then never returns, within a library, where Python
raises nothing. With AGAIN in the environment the signal comes a second time, so many seconds later.
"""

import ctypes
import functools
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

MAIN = os.getpid()


def stop_at(place: str, number: signal.Signals, *, stuck: bool) -> None:
    """Let the first call of a function send this process a signal."""
    module, _, name = place.partition(":")
    holder: Any = importlib.import_module(module)
    *owners, name = name.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    function = getattr(holder, name)
    sent = []

    @functools.wraps(function)  # so that a worker finds it by its name
    def stopping(*arguments: Any, **options: Any) -> Any:
        if not sent:
            sent.append(True)
            os.write(1, f"came to {place} {os.getpid()} {time.time()}\n".encode())
            if "AGAIN" in os.environ:
                threading.Timer(float(os.environ["AGAIN"]), os.kill, (MAIN, number)).start()
            if not stuck:
                os.kill(MAIN, number)
            else:
                threading.Timer(0.5, os.kill, (MAIN, number)).start()
                lock = ctypes.CDLL(None).pthread_mutex_lock
                mutex = (ctypes.c_char * 64)()
                lock(mutex)
                lock(mutex)  # for ever; no signal interrupts it
        return function(*arguments, **options)

    setattr(holder, name, stopping)


if __name__ == "__main__":
    from lema.cli import main

    number, place, stuck, *sys.argv[:] = sys.argv[1:]
    if "WORKERS" in os.environ:  # several processes tokenise, also the smallest file
        importlib.import_module("lema.data.cache").SMALL = 0  # type: ignore[attr-defined]
        os.sched_getaffinity = lambda _: {0, 1}
    stop_at(place, signal.Signals[number], stuck=stuck == "1")
    main()
