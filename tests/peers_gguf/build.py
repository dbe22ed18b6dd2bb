"""Gets the sources of llama-cpp-python, builds llama.cpp in them for this CPU's family, and installs the Python part.

    python tests/peers_gguf/build.py DIRECTORY

does nothing where the directory has all of it, and nothing but the Python part where the environment variable
LLAMA_CPP names a directory of llama.cpp.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

RELEASE = "llama-cpp-python==0.3.36"
TARGETS = ("llama", "llama-quantize", "llama-completion", "llama-server")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "CMAKE_CXX_FLAGS_RELEASE": "-O2 -DNDEBUG",
    "CMAKE_C_FLAGS_RELEASE": "-O2 -DNDEBUG",
}


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run([str(word) for word in command], check=True, env=os.environ | variables)


def download(folder: Path) -> Path:
    """Return the file of the sources."""
    name = RELEASE.partition("==")[0]
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, RELEASE)
    run(*pip, "--dest", folder, CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    (file,) = folder.glob("*.tar.gz")
    return file


def unpack(file: Path, directory: Path) -> None:
    """Put the sources into a directory that appears when all are there."""
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(file) as archive:
        archive.extractall(part, filter="data")
    (top,) = part.iterdir()
    top.rename(directory)
    part.rmdir()


def compile_sources(directory: Path) -> None:
    """Build llama.cpp."""
    sources = directory / "vendor/llama.cpp"
    defined = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    run("cmake", "-S", sources, "-B", sources / "build", "-G", "Ninja", *defined)
    run("cmake", "--build", sources / "build", "--target", *TARGETS)


def main(directory: Path) -> None:
    """Have everything in a directory."""
    if "LLAMA_CPP" not in os.environ:
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as folder:
                unpack(download(Path(folder)), directory)
        compile_sources(directory)
    if find_spec("llama_cpp") is None:
        # the libraries are those that were built above (`LLAMA_CPP_LIB_PATH` in conftest.py)
        part = str(directory) if directory.exists() else RELEASE
        run(sys.executable, "-m", "pip", "install", part, CMAKE_ARGS="-DLLAMA_BUILD=OFF")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
