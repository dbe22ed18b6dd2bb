"""llama.cpp is built in an environment of its own (`tox -e gguf`); elsewhere nothing is collected.

The environment variable LLAMA_CPP names its directory; else it is where `tests/peers_gguf/build.py` puts it.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("llama_cpp", "gguf", "sentencepiece")
collect_ignore = [] if all(map(find_spec, NEEDED)) else ["test_llamacpp.py", "test_gguf_page.py"]


def choose_programs() -> None:
    """Let LEMA and these tests take the programs and libraries of one build."""
    directory = Path(os.environ.setdefault("LLAMA_CPP", str(Path(sys.prefix) / "llama.cpp")))
    for folder in ("build/bin", "vendor/llama.cpp/build/bin"):
        programs = directory / folder
        if programs.is_dir():
            os.environ["PATH"] = os.pathsep.join((str(programs), os.environ["PATH"]))
            os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(programs))


if not collect_ignore:
    choose_programs()
