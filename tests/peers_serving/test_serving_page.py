"""The commands of docs/serving.md for vLLM run as they stand, with a tiny model and the server's
address; and a server takes fifty adapters in a row.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servedmodels import (
    BOUND,
    ROWS,
    difference,
    log_probabilities,
    measured,
    model_of,
    next_log_probability,
    trained,
)
from vllmserver import VllmServer, arguments_of, vllm_server

from lema.cli.app import app
from lema.cli.exitcodes import run as run_command
from lema.convert.serving.export import export_adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
ROW = ROWS[0]
LONG = [7 * place % 290 + 3 for place in range(100)]
SWAPS = 50


def block(name: str) -> list[str]:
    """The lines of a block of the page, without comments."""
    (text,) = re.findall(rf"<!-- {name} -->\n```bash\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL)
    return [line.partition("  #")[0].rstrip() for line in text.splitlines()]


def sent(line: str) -> tuple[str, dict[str, Any]]:
    """The path and the content of a line of `curl`."""
    words = shlex.split(line)
    assert words[0] == "curl"
    (url,) = [word for word in words if word.startswith("http://localhost:8000/")]
    content = json.loads(words[words.index("-d") + 1])
    return url.removeprefix("http://localhost:8000"), content


@dataclass(frozen=True)
class Run:
    """A directory with a model and a trained adapter, and the page's server of them."""

    directory: Path
    model: Path
    adapter: Path
    server: VllmServer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("page")
    model = model_of("llama", directory / "model")
    adapter = trained(model, directory / "output" / "my-run", lora_rank=16)
    export, serve = block("vllm adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert run_command(app, shlex.split(export)[1:]) == 0
        printed = (directory / "served" / "SERVE.md").read_text(encoding="utf-8")
        line = serve.replace("MODEL", shlex.quote(str(model))).replace("/path/to", str(directory))
        assert printed == f"```bash\n{line}\n```\n"
        with vllm_server(arguments_of(line), directory / "log") as server:
            yield Run(directory, model, adapter, server)


def test_the_page_s_server_answers_as_peft(run: Run) -> None:
    answer = run.server.log_probabilities("served", [ROW])
    expected = log_probabilities(run.model, run.adapter, [ROW])
    assert difference(log_probabilities(run.model, None, [ROW]), expected) > 0.1
    measured("llama, the page's lines", difference(answer, expected))


def test_a_server_answers_as_the_newest_of_fifty_adapters(run: Run) -> None:
    """Each is put in the place of the one before it, by the page's lines; every fifth is taken out
    before, which the server must know."""
    load, unload = block("vllm swap")
    path, content = sent(load)
    worst = 0.0
    before = log_probabilities(run.model, None, [ROW])
    for number in range(SWAPS):
        rank = (8, 16)[number % 2]
        trained_one = trained(
            run.model, run.directory / f"trained-{number}", seed=100 + number, lora_rank=rank
        )
        exported = run.directory / f"served-{number}"
        export_adapter(trained_one, exported, "vllm")
        if number % 5 == 4:
            run.server.ask(sent(unload)[0], **sent(unload)[1])
        run.server.ask(path, **content | {"lora_path": str(exported)})
        expected = log_probabilities(run.model, trained_one, [ROW])
        assert difference(before, expected) > 0.05
        worst = max(worst, difference(run.server.log_probabilities("served", [ROW]), expected))
        newest = next_log_probability(run.model, trained_one, LONG)
        worst = max(worst, abs(run.server.next_log_probability("served", LONG) - newest))
        before = expected
    measured(f"llama, {SWAPS} adapters in a row", worst)


def test_a_directory_that_is_written_again_is_served_with_the_old_prefix(run: Run) -> None:
    """What the page warns of: vLLM's cache of prefixes goes by the adapter's name and path."""
    directory = run.directory / "again"
    answers = []
    for number in range(2):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(run.directory / f"served-{2 * number}", directory)
        run.server.load("again", directory, replace=True)
        answers.append(run.server.next_log_probability("again", LONG))
    expected = [
        next_log_probability(run.model, run.directory / f"trained-{2 * number}", LONG)
        for number in range(2)
    ]
    assert abs(answers[0] - expected[0]) < BOUND
    assert abs(answers[1] - expected[1]) > 0.01
    # The rows of prompts whose log-probabilities are asked for are computed anew.
    newest = log_probabilities(run.model, run.directory / "trained-2", [LONG])
    assert difference(run.server.log_probabilities("again", [LONG]), newest) < BOUND


def test_the_page_s_merged_model_is_served(run: Run, tmp_path: Path) -> None:
    merge, serve = block("vllm merged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.directory)
        assert run_command(app, shlex.split(merge)[1:]) == 0
        with vllm_server(arguments_of(serve), tmp_path / "log") as server:
            answer = server.log_probabilities(shlex.split(serve)[2], ROWS)
    expected = log_probabilities(run.model, run.adapter)
    measured("llama, the page's merged model", difference(answer, expected))


def test_vllm_takes_the_line_of_a_model_whose_experts_it_has_in_one_tensor(tmp_path: Path) -> None:
    # Warnings of these imports are errors until a test begins.
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model = model_of("gpt_oss", tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter")
    line = export_adapter(adapter, tmp_path / "served", "vllm").line
    parser = make_arg_parser(FlexibleArgumentParser())
    (module,) = parser.parse_args(arguments_of(line)).lora_modules
    assert (module.name, module.path) == ("served", str(tmp_path / "served"))
    assert module.is_3d_lora_weight
