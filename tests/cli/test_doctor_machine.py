"""What the doctor says of a machine, told by files and limits that a test wrote."""

from pathlib import Path

import psutil
import pytest

from lema.backend import Finding, Level
from lema.backend.host.processors import usable_processors, usable_threads
from lema.backend.hostmemory import memory_left, memory_limit
from lema_tools.doctor.machine import (
    ENOUGH_FILES,
    LAUNCHED,
    Limits,
    environment,
    huge_pages,
    locked_memory,
    machine,
    memory,
    open_files,
    processors,
    shared_memory,
)

TOTAL = psutil.virtual_memory().total


def root_with(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def limits_of(soft: int | None, hard: int | None = None) -> Limits:
    return lambda _: (soft, hard)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "4096\n"}, 4096),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": "8192\n",
            },
            8192,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "8192\n",
                "sys/fs/cgroup/a/memory.max": "4096\n",
            },
            4096,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,  # what these groups say when they mean none
        ),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/memory.max": "1024\n"}, 1024),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpuset,memory:/jobs/1\n0::/\n",
                "sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes": "2048\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            2048,  # mounted together, under the names of both
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/jobs/1\n0::/\n",
                "sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes": "2048\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            2048,
        ),
        ({}, None),
    ],
)
def test_the_limit_is_the_least_of_all_control_groups(
    files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    assert memory_limit(root_with(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"sys/fs/cgroup/a/memory.max": "1000", "sys/fs/cgroup/a/memory.current": "600"}, 400),
        (
            {
                "sys/fs/cgroup/a/memory.max": "1000",
                "sys/fs/cgroup/a/memory.current": "600",
                # 300 can be dropped
                "sys/fs/cgroup/a/memory.stat": "anon 250\nfile 350\nshmem 50\n",
            },
            700,
        ),
        (
            {
                "sys/fs/cgroup/a/memory.max": "max",
                "sys/fs/cgroup/memory.max": "500",
                "sys/fs/cgroup/memory.current": "100",
            },
            400,
        ),
        ({"sys/fs/cgroup/a/memory.max": "max"}, None),
    ],
)
def test_what_is_left_of_a_limit_leaves_out_what_can_be_dropped(
    files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    assert memory_left(root_with(tmp_path, {"proc/self/cgroup": "0::/a\n", **files})) == left


def test_a_limit_below_the_machines_memory_is_warned_of(tmp_path: Path) -> None:
    group = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000000"}
    found = memory(root_with(tmp_path, group))
    assert (found.level, found.facts["limit_bytes"]) == (Level.WARNING, 10**9)
    assert "1.0 GB" in found.how
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(2 * TOTAL))
    found = memory(tmp_path)
    assert (found.level, found.facts["total_bytes"]) == (Level.OK, TOTAL)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "50000 100000\n"},
        {
            "proc/self/cgroup": "2:cpu:/x\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_a_quota_bounds_the_processors(files: dict[str, str], tmp_path: Path) -> None:
    assert usable_processors(root_with(tmp_path, files)) == 0.5
    assert usable_threads(tmp_path) == 1
    found = processors(tmp_path)
    assert (found.level, found.facts["usable_threads"]) == (Level.NOTE, 0.5)


def test_without_a_quota_processors_are_those_of_the_affinity(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "proc/cpuinfo": "model name\t: Six\n",
    }
    assert (
        usable_processors(root_with(tmp_path, files)) == usable_processors(tmp_path / "none") >= 1
    )
    assert processors(tmp_path).facts["model"] == "Six"


@pytest.mark.parametrize(
    ("text", "level", "setting"),
    [
        ("always [madvise] never", Level.OK, "madvise"),
        ("[always] madvise never", Level.OK, "always"),
        ("always madvise [never]", Level.NOTE, "never"),
        (None, Level.NOTE, ""),
    ],
)
def test_huge_pages_are_told_from_their_setting(
    text: str | None, level: Level, setting: str, tmp_path: Path
) -> None:
    if text is not None:
        root_with(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    found = huge_pages(tmp_path)
    assert (found.level, found.facts["setting"]) == (level, setting)


@pytest.mark.parametrize(
    ("soft", "capabilities", "level"),
    [
        (8 << 20, "0000000000000000", Level.NOTE),
        (8 << 20, "0000000000004000", Level.OK),  # CAP_IPC_LOCK
        (8 << 20, "000001ffffffbfff", Level.NOTE),  # every other capability
        (None, "0000000000000000", Level.OK),
    ],
)
def test_a_lock_limit_is_told_unless_it_does_not_bind(
    soft: int | None, capabilities: str, level: Level, tmp_path: Path
) -> None:
    root_with(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"})
    found = locked_memory(tmp_path, limits_of(soft))
    assert found.level is level
    assert bool(found.how) is (level is not Level.OK)
    assert found.facts["limit_bytes"] == soft
    assert found.facts["hard_limit_bytes"] is None


def test_few_open_files_are_warned_of() -> None:
    assert open_files(limits_of(ENOUGH_FILES)).level is Level.OK
    found = open_files(limits_of(ENOUGH_FILES - 1))
    assert (found.level, found.facts["limit"]) == (Level.WARNING, ENOUGH_FILES - 1)
    assert open_files(limits_of(None)).level is Level.OK


def test_shared_memory_needs_no_directory_and_is_a_file_without_the_systems_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared_memory(tmp_path).level is Level.OK  # no /dev/shm below this root
    monkeypatch.delattr("os.memfd_create")
    found = shared_memory(tmp_path)
    assert (found.level, found.facts["memfd"]) == (
        Level.NOTE,
        False,
    ) and "temporary file" in found.what


def test_a_small_dev_shm_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr("lema_tools.doctor.machine.ENOUGH_SHARED", 1 << 60)
    found = shared_memory(tmp_path)
    assert found.level is Level.NOTE
    assert isinstance(found.facts["total_bytes"], int)


def test_a_dev_shm_that_cannot_be_written_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    # root may write to any that is not mounted to be read
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = shared_memory(tmp_path)
    assert found.level is Level.NOTE and "cannot be written" in found.what


def test_of_this_machine_everything_is_told() -> None:
    names = [finding.name for finding in machine()]
    assert names == [
        "system",
        "processors",
        "memory",
        "huge pages",
        "locked memory",
        "open files",
        "shared memory",
    ]


# The environment


def found_in(given: dict[str, str], threads: float = 8) -> dict[str, Finding]:
    return {finding.name: finding for finding in environment(given, threads)}


def test_an_environment_without_settings_is_one_finding() -> None:
    assert list(found_in({"PATH": "/bin", "HOME": "/root"})) == ["variables"]


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("OMP_NUM_THREADS", "1", Level.NOTE),
        ("OMP_NUM_THREADS", "8", Level.OK),
        ("OMP_NUM_THREADS", "4,2", Level.NOTE),
        ("HF_HUB_OFFLINE", "1", Level.NOTE),
        ("HF_HUB_OFFLINE", "0", Level.OK),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", Level.OK),
        ("PYTORCH_SOME_ALLOC_CONF", "x", Level.OK),
        ("HF_HOME", "/data", Level.OK),
    ],
)
def test_a_variable_is_told_with_what_it_does(variable: str, value: str, level: Level) -> None:
    found = found_in({variable: value})
    assert list(found) == [variable]
    assert (found[variable].level, found[variable].facts["value"]) == (level, value)


def test_a_token_is_never_shown() -> None:
    (found,) = found_in({"HF_TOKEN": "hf_secret"}).values()
    assert "hf_secret" not in str(found.to_dict())


def test_what_torchrun_sets_is_there_as_a_whole_or_not_at_all() -> None:
    whole = dict.fromkeys(LAUNCHED, "1")
    assert found_in(whole)["torchrun"].level is Level.NOTE
    for missing in LAUNCHED:
        found = found_in({name: value for name, value in whole.items() if name != missing})[
            "torchrun"
        ]
        assert found.level is Level.WARNING
        assert f"{missing} not" in found.what
