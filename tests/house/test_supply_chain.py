"""What is installed is known to the version, what is built is the same twice, and what is
written tells no secrets.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SECRETS = {
    "HF_TOKEN": "hf_9c1dTokenOfNobody",
    "WANDB_API_KEY": "4be7KeyOfNobody",
    "LEMA_TEST_PASSWORD": "w0rdOfNobody",
}


def locked() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize(
    "asked", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
)
def test_every_package_that_is_asked_for_is_locked_within_its_range(asked: str) -> None:
    requirement = Requirement(asked)
    versions = locked()
    if requirement.name == "lema-lora":
        assert {"torchao", "bitsandbytes", "compressed-tensors"} <= versions.keys()
    else:
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_tests_install_by_the_lock() -> None:
    (section,) = re.findall(
        r"^\[testenv\]\n(.*?)^\[testenv:", (ROOT / "tox.ini").read_text(), re.DOTALL | re.MULTILINE
    )
    assert "    PIP_CONSTRAINT = {tox_root}/constraints.txt\n" in section


@pytest.mark.slow
def test_a_wheel_is_the_same_when_it_is_built_again(tmp_path: Path) -> None:
    digests = []
    for number in (1, 2):
        tree = tmp_path / f"tree {number}"
        out = tmp_path / f"out {number}"
        left_out = shutil.ignore_patterns(".*", "tests", "__pycache__", "output", "build", "dist")
        # with other times
        shutil.copytree(ROOT, tree, ignore=left_out, copy_function=shutil.copyfile)
        code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
        subprocess.run(
            [sys.executable, "-c", code, str(out)], cwd=tree, check=True, capture_output=True
        )
        (wheel,) = out.glob("lema_lora-*.whl")
        digests.append(sha256(wheel.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_nothing_written_tells_a_secret_and_files_get_the_permissions_of_any_other(
    tmp_path: Path,
) -> None:
    code = (
        "import os; os.umask(0o077)\n"
        "from pathlib import Path\n"
        "from lema.cli.app import app\n"
        "from lema_tools.demo import run_demo\n"
        "from lema.cli.exitcodes import run\n"
        "run_demo(Path('lema-demo'), max_steps=2)\n"
        "Path('my.yaml').write_text('model_name_or_path: lema-demo/model\\ndevice: "
        "cpu\\noutput_dir: run\\n'"
        "    'train_data: lema-demo/data/chat.jsonl\\nmax_steps: 2\\nsave_steps: "
        "1\\nreport_to: [tensorboard]\\n')\n"
        "codes = [run(app, words.split()) for words in ('train my.yaml --trace "
        "trace.json', 'config show my.yaml',\n"
        "    'merge run merged', 'prepare lema-demo/model prepared', 'doctor --quick --json')]\n"
        "assert codes == [0] * 5, codes\n"
        "os.umask(0o022)\n"
        "assert run(app, 'train my.yaml --set output_dir=open/run --set "
        "max_steps=1'.split()) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | SECRETS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 40
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in written}
    assert [path for path, mode in modes.items() if path.parts[0] != "open" and mode & 0o077] == []
    ours = {
        mode for path, mode in modes.items() if path.parts[0] == "open" and path.parts[1] != "model"
    }
    assert ours == {0o644}  # `transformers` writes the model
    said = [done.stdout.encode(), done.stderr.encode(), *(path.read_bytes() for path in written)]
    assert not [
        name for name, secret in SECRETS.items() if any(secret.encode() in one for one in said)
    ]
