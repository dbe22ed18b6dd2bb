"""No verb writes over what it reads, whatever name either has, nor through a link, nor over a
device or a pipe.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clirun import TEXTS, assert_refused, config_writer, lema, write_rows

Named = Callable[[Path, Path], Path]
Files = dict[Path, bytes]


def itself(file: Path, place: Path) -> Path:
    return file


def symlink(file: Path, place: Path) -> Path:
    place.symlink_to(file)
    return place


def hard_link(file: Path, place: Path) -> Path:
    os.link(file, place)
    return place


def relative(file: Path, place: Path) -> Path:
    return Path(os.path.relpath(file, Path.cwd()))


def roundabout(file: Path, place: Path) -> Path:
    (place.parent / "round").mkdir()
    return place.parent / "round" / ".." / os.path.relpath(file, place.parent)


NAMES: list[Named] = [itself, symlink, hard_link, relative, roundabout]


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    shutil.copytree(llama, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    return config_writer(model, tmp_path)()


def contents(*places: Path) -> Files:
    files = [
        file
        for place in places
        for file in ([place] if place.is_file() else sorted(place.rglob("*")))
    ]
    return {file: file.read_bytes() for file in files if file.is_file()}


@pytest.fixture
def unchanged(config: Path, model: Path, tmp_path: Path) -> Iterator[None]:
    before = contents(model, config, tmp_path / "data.jsonl")
    yield
    assert contents(model, config, tmp_path / "data.jsonl") == before


@pytest.mark.parametrize("named", NAMES)
@pytest.mark.parametrize(
    "which", ["model/*.safetensors", "model/config.json", "data.jsonl", "run.yaml"]
)
@pytest.mark.usefixtures("unchanged")
def test_a_trace_is_written_over_nothing_that_the_run_reads(
    which: str, named: Named, config: Path, tmp_path: Path, capfd: Any
) -> None:
    target = named(next(tmp_path.glob(which)), tmp_path / "trace.json")
    words = (
        ["--trace", "is a link"]
        if named is symlink
        else ["--trace", "would write over what it reads"]
    )
    assert_refused(capfd, 2, words, "train", config, "--trace", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("named", NAMES)
@pytest.mark.usefixtures("unchanged")
def test_a_plot_is_drawn_over_nothing_that_the_plan_reads(
    named: Named, config: Path, tmp_path: Path, capfd: Any
) -> None:
    target = named(next((tmp_path / "model").glob("*.safetensors")), tmp_path / "plot.png")
    assert_refused(capfd, 2, ["--plot"], "plan", config, "--plot", target)


@pytest.mark.parametrize("named", NAMES)
def test_results_are_written_over_nothing_that_generate_reads(
    named: Named, config: Path, tmp_path: Path, capfd: Any
) -> None:
    prompts = write_rows(tmp_path / "prompts.txt", TEXTS[:2])
    before = prompts.read_bytes()
    target = named(prompts, tmp_path / "out.jsonl")
    command = ["generate", config, "--prompts", prompts, "--output", target, "--max-new-tokens", 1]
    assert_refused(capfd, 2, [], *command)
    assert_refused(capfd, 2, [], *command, "--resume")
    assert prompts.read_bytes() == before


@pytest.mark.parametrize("named", [itself, symlink, hard_link, relative])
@pytest.mark.parametrize("which", ["*.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.usefixtures("unchanged")
def test_a_model_is_not_prepared_over_one_of_its_files(
    which: str, named: Named, model: Path, tmp_path: Path, capfd: Any
) -> None:
    target = named(next(model.glob(which)), tmp_path / "prepared.safetensors")
    assert_refused(capfd, 2, ["model"], "prepare", model, target)


def directory_itself(place: Path, other: Path) -> Path:
    return place


def linked_directory(place: Path, other: Path) -> Path:
    other.symlink_to(place, target_is_directory=True)
    return other


@pytest.mark.parametrize("named", [directory_itself, linked_directory, relative, roundabout])
@pytest.mark.parametrize("which", ["model", "rows"])
def test_output_dir_is_no_directory_that_the_run_reads(
    which: str, named: Named, model: Path, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / "data.jsonl", TEXTS)
    output = named(tmp_path / which, tmp_path / "out")
    config = config_writer(model, tmp_path)(
        output_dir=str(output), train_data=str(tmp_path / "rows")
    )
    before = contents(model, tmp_path / "rows")
    for more in ([], ["--resume"], ["--set", "overwrite_output_dir=true"]):
        assert_refused(
            capfd, 2, ["output_dir", "would write over what it reads"], "train", config, *more
        )
    assert contents(model, tmp_path / "rows") == before
    phases = tmp_path / "phases.yaml"
    phases.write_text(
        config.read_text() + "phases:\n  - name: first\n    mode: lora\n    max_steps: 1\n"
    )
    assert_refused(capfd, 2, [], "train", phases)
    assert contents(model, tmp_path / "rows") == before


def test_the_metrics_are_not_written_into_the_data(model: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "out").mkdir()
    data = write_rows(tmp_path / "out" / "metrics.jsonl", TEXTS)
    config = config_writer(model, tmp_path)(train_data=str(data))
    before = data.read_bytes()
    assert_refused(capfd, 2, ["output_dir", "metrics.jsonl"], "train", config)
    assert data.read_bytes() == before


def test_a_run_does_not_log_through_a_link(model: Path, tmp_path: Path, capfd: Any) -> None:
    victim = tmp_path / "victim"
    config = config_writer(model, tmp_path)(max_steps=4, save_steps=2)
    victim.write_text("one\nlast line without newline")
    assert lema("train", config) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "out" / "metrics.jsonl").unlink()
    (tmp_path / "out" / "metrics.jsonl").symlink_to(victim)
    assert_refused(capfd, 3, ["metrics.jsonl is a link"], "train", config, "--resume")
    assert victim.read_text() == "one\nlast line without newline"


@pytest.fixture(scope="module")
def ended(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ended")
    assert lema("train", config_writer(llama, place)()) == 0
    return place / "out"


def private(file: Path) -> None:
    own = file.parent.parent / "private"
    own.write_text("SECRET")
    file.symlink_to(own)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    os.mkfifo(file)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", [private, endless, pipe])
@pytest.mark.parametrize(
    "name", ["certificate.md", "certificate.json", "plan.json", "metrics.jsonl", "trace.json"]
)
def test_a_report_has_nothing_from_outside_the_run(
    name: str, plant: Callable[[Path], None], ended: Path, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    (run / name).unlink(missing_ok=True)
    plant(run / name)
    assert_refused(capfd, 3, [name], "report", run)
    assert not (run / "report.html").exists()
    if name in ("plan.json", "metrics.jsonl"):
        assert_refused(capfd, 3, [name], "watch", run, "--once")


def test_a_report_replaces_nothing_that_it_reads(ended: Path, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    os.mkfifo(tmp_path / "pipe")
    os.link(run / "metrics.jsonl", tmp_path / "hard")
    before = contents(run)
    for target in (
        run / "metrics.jsonl",
        run / "plan.json",
        tmp_path / "hard",
        tmp_path / "pipe",
        Path("/dev/full"),
    ):
        assert_refused(capfd, 2, [target.name], "report", run, "--output", target)
    assert contents(run) == before
    assert lema("report", run) == 0
    assert lema("report", run) == 0
    assert lema("report", run, "--output", run / "other.html") == 0


def test_a_certificate_is_not_written_into_the_model(model: Path, capfd: Any) -> None:
    before = contents(model)
    assert_refused(capfd, 2, ["would write over what it reads"], "prove", model, "--output", model)
    assert contents(model) == before


@pytest.mark.parametrize(
    "command", [("merge", "{ended}", "{out}"), ("shard", "{ended}", "{out}", "--tp", "2")]
)
def test_a_link_to_what_is_not_there_makes_nothing_there(
    command: tuple[str, ...], ended: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "elsewhere")
    words = [word.format(ended=ended, out=out) for word in command]
    assert_refused(capfd, 2, ["a link to what is not there", str(out)], *words)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "elsewhere").mkdir()  # to a directory on another disk, for example
    assert lema(*words) == 0
    assert any((tmp_path / "elsewhere").iterdir())


def test_reports_and_traces_replace_nothing_but_their_own_kind(
    ended: Path, config: Path, tmp_path: Path, capfd: Any
) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("years of work")
    assert_refused(capfd, 2, ["notes.md exists"], "report", ended, "--output", notes)
    assert_refused(capfd, 2, ["--trace", "notes.md exists"], "train", config, "--trace", notes)
    assert notes.read_text() == "years of work"
    for again in ([], ["--set", "overwrite_output_dir=true"]):
        assert lema("train", config, "--trace", tmp_path / "trace.json", *again) == 0
    assert lema("report", ended, "--output", tmp_path / "page.html") == 0
    assert lema("report", ended, "--output", tmp_path / "page.html") == 0


Link = Callable[[Path, Path], Path]


def below(place: Path, other: Path) -> Path:
    return place / "sub"


def below_what_is_missing(place: Path, other: Path) -> Path:
    return place / "new" / "sub"


def below_a_link(place: Path, other: Path) -> Path:
    other.symlink_to(place, target_is_directory=True)
    return other / "sub"


def below_a_relative_name(place: Path, other: Path) -> Path:
    return Path(os.path.relpath(place, Path.cwd())) / "sub"


def below_a_roundabout_name(place: Path, other: Path) -> Path:
    return roundabout(place, other) / "sub"


BELOW: list[Link] = [
    below,
    below_what_is_missing,
    below_a_link,
    below_a_relative_name,
    below_a_roundabout_name,
]
INTO = "would write into a directory that it reads"


@pytest.fixture(scope="module")
def place(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, rows, an adapter, and its shards."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(llama, place / "model")
    (place / "rows").mkdir()
    write_rows(place / "rows" / "data.jsonl", TEXTS)
    assert (
        lema("train", config_writer(place / "model", place)(output_dir=str(place / "adapter"))) == 0
    )
    assert lema("shard", place / "adapter", place / "shards", "--tp", 2) == 0
    return place


@pytest.mark.parametrize("named", BELOW)
@pytest.mark.parametrize("which", ["model", "rows", "adapter"])
def test_output_dir_lies_in_no_directory_that_the_run_reads(
    which: str, named: Link, place: Path, tmp_path: Path, capfd: Any
) -> None:
    output = named(place / which, tmp_path / "out")
    before = contents(place)
    more = {"adapter_name_or_path": str(place / "adapter")} if which == "adapter" else {}
    write = config_writer(place / "model", tmp_path)
    config = write(output_dir=str(output), train_data=str(place / "rows"), **more)
    for options in ([], ["--resume"], ["--set", "overwrite_output_dir=true"]):
        assert_refused(capfd, 2, ["output_dir", INTO], "train", config, *options)
    assert contents(place) == before and not output.exists()


@pytest.mark.parametrize("named", BELOW)
@pytest.mark.parametrize("which", ["model", "adapter"])
@pytest.mark.parametrize("verb", ["merge", "shard", "consolidate", "names", "eval", "generate"])
def test_nothing_is_written_into_a_model_or_an_adapter_that_is_read(
    verb: str, which: str, named: Link, place: Path, tmp_path: Path, capfd: Any
) -> None:
    if verb == "consolidate" and which == "adapter":
        which = "shards"
    adapter = place / "adapter"
    target = named(place / which, tmp_path / "out")
    before = contents(place)
    words: dict[str, list[Any]] = {
        "merge": ["merge", adapter, target],
        "shard": ["shard", adapter, target, "--tp", 2],
        "consolidate": ["consolidate", place / "shards", target],
        "names": ["consolidate", adapter, target, "--names", "text"],
        "eval": ["eval", adapter, "--tasks", "any", "--output", target],
        "generate": ["generate", adapter, "--prompt", "a", "--output", target],
    }
    assert_refused(capfd, 2, [INTO], *words[verb])
    assert contents(place) == before and not target.exists()


@pytest.mark.parametrize("named", BELOW)
@pytest.mark.parametrize("verb", ["prepare", "prove", "init", "plan", "train"])
def test_nothing_is_written_into_a_model_that_is_read(
    verb: str, named: Link, config: Path, model: Path, tmp_path: Path, capfd: Any
) -> None:
    target = named(model, tmp_path / "other")
    before = contents(model)
    words: dict[str, list[Any]] = {
        "prepare": ["prepare", model, target],
        "prove": ["prove", model, "--output", target],
        "init": [
            "init",
            model,
            "--device-memory",
            "8GB",
            "--data",
            tmp_path / "data.jsonl",
            "--output",
            target,
        ],
        "plan": ["plan", config, "--plot", target.with_suffix(".png")],
        "train": ["train", config, "--trace", target],
    }
    assert_refused(capfd, 2, [INTO], *words[verb])
    assert contents(model) == before and not target.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ["offload_dir", "data_cache"])
@pytest.mark.parametrize("which", ["model", "rows"])
def test_nor_is_what_waits_on_disk_or_kept_for_another_run(
    which: str, setting: str, place: Path, tmp_path: Path, capfd: Any
) -> None:
    before = contents(place)
    more = {setting: str(place / which / "kept")}
    config = config_writer(place / "model", tmp_path)(train_data=str(place / "rows"), **more)
    assert_refused(capfd, 2, [setting, INTO], "train", config)
    assert contents(place) == before


def test_settings_are_not_written_into_the_data(place: Path, capfd: Any) -> None:
    before = contents(place)
    words = [
        "--device-memory",
        "8GB",
        "--data",
        place / "rows",
        "--output",
        place / "rows" / "my.yaml",
    ]
    assert_refused(capfd, 2, [INTO], "init", place / "model", *words)
    assert contents(place) == before


@pytest.mark.parametrize("verb", ["train", "prove", "init"])
def test_a_name_that_is_taken_is_refused_before_anything_is_computed(
    verb: str,
    config: Path,
    model: Path,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lema.train.model.LemaModel.__init__", lambda *_, **__: pytest.fail("a model was opened")
    )
    (tmp_path / "file").write_text("mine")
    (tmp_path / "leads nowhere").symlink_to(tmp_path / "nothing")
    for taken in (tmp_path / "file", tmp_path / "leads nowhere"):
        words: dict[str, list[Any]] = {
            "train": ["train", config, "--output_dir", taken],
            "prove": ["prove", model, "--output", taken],
            "init": [
                "init",
                model,
                "--device-memory",
                "8GB",
                "--data",
                tmp_path / "data.jsonl",
                "--output",
                taken,
            ],
        }
        assert_refused(capfd, 2, [taken.name], *words[verb])
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "nothing").exists()


def test_outputs_lie_beside_and_around_what_is_read(
    ended: Path, model: Path, tmp_path: Path
) -> None:
    """The layouts that people use: a run beside its model, or around the adapter that it begins
    with; one file of weights above its runs, or beside its config; results of a run in its
    directory."""
    assert lema("prepare", model, model / "one.safetensors") == 0
    assert lema("prepare", model / "one.safetensors", tmp_path / "model.safetensors") == 0
    new = ["--max-new-tokens", 2]
    place = tmp_path / "model-runs"  # the name begins as the model's does
    write = config_writer(model, tmp_path)
    weights = str(tmp_path / "model.safetensors")
    config = write(output_dir=str(place / "first"), gbi_path=weights)
    assert lema("train", config, "--trace", place / "first" / "trace.json") == 0
    assert (
        lema("generate", config, "-p", "a", *new, "--output", place / "first" / "results.jsonl")
        == 0
    )
    assert lema("merge", place / "first", place / "merged") == 0
    assert lema("report", place / "first") == 0
    around = write(output_dir=str(place), adapter_name_or_path=str(place / "first"))
    assert lema("train", around) == 0


@pytest.mark.parametrize("name", ["notes.txt", "picture.png"])
def test_plots_results_and_certificates_replace_nothing_but_their_own_kind(
    name: str, ended: Path, config: Path, model: Path, tmp_path: Path, capfd: Any
) -> None:
    notes = tmp_path / name
    notes.write_text("years of work")
    shutil.copy(notes, tmp_path / "certificate.md")
    said = [f"{name} exists"]
    assert_refused(capfd, 2, ["--plot", *said], "plan", config, "--plot", notes)
    assert_refused(
        capfd, 2, ["--output", *said], "eval", ended, "--tasks", "any", "--output", notes
    )
    assert_refused(capfd, 2, [], "generate", ended, "--prompt", "a", "--output", notes)
    assert_refused(
        capfd, 2, [name], "generate", ended, "--prompt", "a", "--output", notes, "--resume"
    )
    assert_refused(capfd, 2, ["certificate.md exists"], "prove", model, "--output", tmp_path)
    assert notes.read_text() == (tmp_path / "certificate.md").read_text() == "years of work"
    for _ in range(2):
        assert lema("plan", config, "--plot", tmp_path / "plot.png") == 0
