"""The words of the Containerfile are those of pyproject.toml; what runs in it has no rights, and
is looked after.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
CONTENT = "\n".join(line for line in LINES.splitlines() if not line.startswith("#"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
(IMAGE,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", CONTENT, re.MULTILINE)
STAGES = {
    name: (base, text)
    for base, name, text in re.findall(
        r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", CONTENT, re.MULTILINE | re.DOTALL
    )
}
IMAGES = "cpu", "cuda"
WORKFLOW = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "release.yml")
DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def whole(name: str) -> str:
    """A stage behind those that it begins with."""
    base, text = STAGES[name]
    return (whole(base) if base in STAGES else "") + text


def labels() -> dict[str, str]:
    return dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', STAGES["base"][1]))


def test_the_base_is_named_once_and_the_image_says_which_it_was() -> None:
    assert {base for base, _ in STAGES.values() if base not in STAGES} == {"${PYTHON_IMAGE}"}
    assert labels()["base.name"] == "${PYTHON_IMAGE}"
    assert STAGES["base"][1].startswith("ARG PYTHON_IMAGE\n"), (
        "a label of a stage knows only the stage's arguments"
    )


def shell(command: str, image: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of bash with a base of that name."""
    environment = {"PATH": os.environ["PATH"], "PYTHON_IMAGE": image, **more}
    return subprocess.run(
        ["bash", "-euc", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("image", "pinned"), [(IMAGE, "@sha256:" in IMAGE), (f"x/python@{DIGEST}", True)]
)
def test_a_build_says_that_its_base_may_be_another_one_tomorrow(image: str, pinned: bool) -> None:
    (command,) = re.findall(r"^RUN (case .*)$", STAGES["base"][1], re.MULTILINE)
    done = shell(command, image)
    assert done.returncode == 0 and done.stdout == ""
    assert (done.stderr == "") == pinned
    if not pinned:
        assert f"the base {image} is not named by a digest" in done.stderr
        assert "fix: --build-arg PYTHON_IMAGE=" in done.stderr


@pytest.mark.parametrize("answer", [DIGEST, "", "error: no such image"])
def test_a_release_is_built_on_the_digest_of_the_day_or_not_at_all(
    answer: str, tmp_path: Path
) -> None:
    image, publish = (WORKFLOW["jobs"][name] for name in ("image", "publish"))
    resolve, build = (step["run"] for step in image["steps"] if "run" in step)
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "{answer}"\n')
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = shell(
        resolve,
        "",
        PATH=path,
        GITHUB_ENV=f"{tmp_path}/env",
        GITHUB_STEP_SUMMARY=f"{tmp_path}/summary",
    )
    assert (tmp_path / "asked").read_text().split()[:3] == ["buildx", "imagetools", "inspect"]
    assert (tmp_path / "asked").read_text().split()[-1] == IMAGE
    assert (done.returncode == 0) == (answer == DIGEST)
    if answer == DIGEST:
        assert (
            tmp_path / "env"
        ).read_text() == f"PYTHON_IMAGE={IMAGE.rpartition(':')[0]}@{DIGEST}\n"
    else:
        assert f"{IMAGE} has no digest: {answer}" in done.stderr and not (tmp_path / "env").exists()
    assert '--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"' in build and "image" in publish["needs"]


def test_its_python_is_that_of_the_lock_and_one_that_lema_takes() -> None:
    (version,) = re.findall(r"/python:(\d+\.\d+)-", IMAGE)
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    assert (
        f" on Python {version};"
        in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    )


def test_it_says_what_it_is_in_the_projects_words() -> None:
    expected = {
        "title": PROJECT["name"],
        "description": PROJECT["description"],
        "licenses": PROJECT["license"],
    }
    assert labels().items() >= expected.items()
    assert {"version", "revision"} <= labels().keys()


@pytest.mark.parametrize("image", IMAGES)
def test_an_environment_has_our_wheel_by_the_lock_with_extras_that_exist(image: str) -> None:
    text = whole(f"{image}-environment")
    ((wheel, extras),) = re.findall(r'"\$\(echo /wheels/([\w*.-]+)\)\[([\w,]+)\]"', text)
    assert wheel == f"{PROJECT['name'].replace('-', '_')}-*.whl"
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert (
        "PIP_CONSTRAINT=/src/constraints.txt" in text and "'^torch==' /src/constraints.txt" in text
    )


@pytest.mark.parametrize("image", IMAGES)
def test_it_runs_lema_as_a_user_without_rights_whom_doctor_looks_after(image: str) -> None:
    text = whole(image)
    assert re.search(r"^RUN useradd --uid 1000 ", text, re.MULTILINE)
    assert [line for line in text.splitlines() if line.startswith("USER ")] == ["USER 1000:1000"]
    after = text.partition("USER 1000:1000\n")[2]
    assert re.match(r"HEALTHCHECK [^\n]*CMD lema doctor --quick \|\| exit 1$", after, re.MULTILINE)
    assert not re.search(r"^(RUN|COPY|ADD)\b", after, re.MULTILINE)
    assert f"COPY --from={image}-environment /opt/lema /opt/lema\n" in text
    (entry,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', text, re.MULTILINE)
    assert entry in PROJECT["scripts"]


def test_a_build_without_a_target_makes_the_one_for_the_cpu() -> None:
    assert [*STAGES][-1] == "cpu"


def test_all_that_the_wheel_is_built_from_is_sent_and_little_else() -> None:
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    packages = {
        Path(package).parts[0]
        for package in SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    files = {
        "pyproject.toml",
        PROJECT["readme"],
        *PROJECT["license-files"],
        SETTINGS["tool"]["hatch"]["version"]["path"],
    }
    assert sent == packages | files | {"constraints.txt"}
