"""Runs the README's commands as a newcomer does after the install, and prints how long they take.

    python tests/support/newcomer.py          # the two commands
    python tests/support/newcomer.py --all    # and the others, whose times the README has

The Python is that of an environment in which LEMA is installed. It ends with code 1 if a command
fails, or if the two commands together take more processor time than `MOST_CPU_SECONDS`. The time on
the clock is printed and not limited, because it depends on what else the machine does.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["MOST_CPU_SECONDS", "commands", "main", "others"]

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
# of user and system time; an idle machine needs far less, a busy one up to 137
MOST_CPU_SECONDS = 300.0
ENVIRONMENT = ".venv/bin/"  # in the README's commands
QUESTION = b"What does the miller bring?\n"  # for what reads the standard input


def commands() -> list[list[str]]:
    """Return the README's commands after the install: the demo, and a run with a file of
    settings.
    """
    (first,) = re.findall(r"<!-- demo command -->\n```bash\n(.*?)\n```", README)
    (second,) = re.findall(
        rf"^{re.escape(ENVIRONMENT)}lema train .*?(?= +#|$)", README, re.MULTILINE
    )
    program = str(Path(sys.executable).parent) + os.sep
    return [
        one.replace(ENVIRONMENT, program).split() for one in (first.rpartition(" && ")[2], second)
    ]


def others() -> list[list[str]]:
    """Return the README's commands for an environment that is active."""
    program = str(Path(sys.executable).parent / "lema")
    lines = re.findall(r"^lema .*?(?= +#|$)", README, re.MULTILINE)
    return [[program, *shlex.split(line)[1:]] for line in lines]


def spent_on(command: list[str], directory: Path) -> float | None:
    """Run a command, print its times, and return the seconds of the processors; None: it failed."""
    before = os.times()
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=directory, input=QUESTION, stdout=subprocess.DEVNULL, check=False
    )
    passed = time.perf_counter() - began
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    name = shlex.join(["lema", *command[1:]])
    sys.stdout.write(f"{name}: {passed:.1f} s on the clock, {used:.1f} s of the processors\n")
    sys.stdout.flush()
    if done.returncode:
        sys.stderr.write(f"{name} ended with code {done.returncode}\n")
        return None
    return used


def main() -> int:
    """Run the commands in an empty directory and print their times; 1: one failed or the first two
    took too long.
    """
    (settings,) = re.findall(r"<!-- config example -->\n```yaml\n(.*?)```", README, re.DOTALL)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "my.yaml").write_text(settings, encoding="utf-8")
        times = [spent_on(command, directory) for command in commands()]
        if None in times:
            return 1
        if not (directory / "output/my-run/adapter_model.safetensors").is_file():
            sys.stderr.write("no adapter was written\n")
            return 1
        spent = sum(used for used in times if used is not None)
        sys.stdout.write(f"both: {spent:.1f} s of the processors, at most {MOST_CPU_SECONDS:g}\n")
        if "--all" in sys.argv[1:] and None in [spent_on(one, directory) for one in others()]:
            return 1
    return int(spent > MOST_CPU_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
