"""What watches the cases of `tests/faults` sees each way in which one can go wrong, and goes on
behind it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import ctypes, json, os, signal, sys
from pathlib import Path
from faults import watch

def case(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        while True:
            pass
    if number == 3:
        bytearray(64 << 20)
    if number == 4:
        return watch.command("config", "show", "nowhere.yaml", named=("elsewhere",))
    if number == 5:
        watch.app.command(name="fails")(lambda: 1 / 0)
        return watch.command("fails")
    if number == 6:
        raise ValueError("of the case itself")
    if number == 7:
        watch.app.command(name="lists")(lambda: print("error: " + "x\\n" * 21, file=sys.stderr) or sys.exit(3))
        return watch.command("lists")
    if number == 8:
        watch.app.command(name="prints")(lambda: chr(0xD800).encode())
        return watch.command("prints")
    if number == 9:
        watch.app.command(name="colours")(lambda: sys.stdout.buffer.write(bytes([27])) and None)
        return watch.command("colours", printed=lambda said: "a command to the terminal" * (chr(27) in said))
    return ""

watch.EACH = 7
seen = watch.watched(11, case, Path(sys.argv[1]), None, growth=32 << 20, seconds=1.5)
print(json.dumps([seen.failures, seen.codes, seen.user]))
"""


def test_a_case_that_dies_hangs_grows_or_says_nothing_is_seen(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found, codes, user = json.loads(done.stdout)
    expected = (
        "case 1: the process ended with -9",
        "case 2: took more than 1.5 s",
        "case 3: took 6",
        "case 4: names nothing, exit 2",
        "case 5: exit 1: error: ZeroDivisionError",
        "case 6: the process ended with 99",
        "case 7: a message of 22 lines",
        "case 8: exit 1: error: UnicodeEncodeError",
        "case 9: a command to the terminal",
    )
    assert [one[: len(begin)] for one, begin in zip(found, expected, strict=True)] == list(expected)
    assert codes == {"0": 1, "1": 2, "2": 1, "3": 1}
    assert user > 1.5
