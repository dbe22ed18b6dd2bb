"""What a run says and leaves at its end can be used as it stands: commands, code of the card,
numbers.
"""

import ast
import shlex
from pathlib import Path
from typing import Any

import pytest

from lema import LemaConfig
from lema.cli.app import resume_command
from lema.cli.progress import ProgressDisplay
from lema.config.units import human_rate
from lema.train.checkpoint.card import model_card
from lema_tools.report import html
from lema_tools.rundir import Run


def test_the_command_that_goes_on_is_one_for_a_shell() -> None:
    command = resume_command(Path("my runs/a.yaml"), ["output_dir=x y"], ["--trust-remote-code"])
    assert shlex.split(command) == [
        *("lema", "train", "my runs/a.yaml", "--set", "output_dir=x y"),
        *("--trust-remote-code", "--resume"),
    ]


@pytest.mark.parametrize("pushed", [False, True])
def test_the_card_of_a_local_base_has_code_that_names_both_directories(
    tmp_path: Path, pushed: bool
) -> None:
    base = tmp_path / "model"
    base.mkdir()
    out = str(tmp_path / "out")
    config = LemaConfig(str(base), output_dir=out, lora_target_parameters=[], push_to_hub=pushed)
    card = model_card(config, str(base), {"training": "8 rows"}, {})
    code = card.partition("```python\n")[2].partition("```")[0]
    texts = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert texts == ({"model", "out"} if pushed else {str(base), out})
    assert not pushed or str(tmp_path) not in card
    for row in ("| rank | 16 |", "| alpha | ", "| target modules | all linear layers", "8 rows"):
        assert row in card
    assert "lora_target_parameters" not in card and "None" not in card


def test_a_card_of_a_run_with_a_long_template_is_written(tmp_path: Path) -> None:
    """A template may have a slash, behind more letters than a name of a file may have."""
    template = f"{{# {'long ' * 80}#}}{{{{ messages[0].content }}}}</s>"
    config = LemaConfig("org/name", output_dir=str(tmp_path / "out"), chat_template=template)
    assert "# out" in model_card(config, "org/name", {"training": "8 rows"}, {})


@pytest.mark.parametrize(
    ("norm", "shown"),
    [(2.1, "grad 2.10"), (0.878, "grad 0.878"), (100.0, "grad 100"), (12345.0, "grad 1.23e+04")],
)
def test_three_significant_digits_keep_their_zero(norm: float, shown: str, capsys: Any) -> None:
    display = ProgressDisplay()
    display.show({"loss": 1.0, "grad_norm": norm})
    display.close()
    assert capsys.readouterr().out.rstrip().endswith(shown)


def test_rates_have_a_space_before_their_unit() -> None:
    assert human_rate(27.8e9, "FLOP/s") == "27.8 GFLOP/s"
    assert human_rate(5, "FLOP/s") == "5 FLOP/s"


def test_a_report_has_no_charts_of_clocks_and_names_the_device(tmp_path: Path) -> None:
    rows = [
        {"step": n, "loss": 2.0, "time": 1.796e9, "num_tokens": 64.0 * n, "memory": 900, "extra": n}
        for n in (1, 2, 3)
    ]
    memory = {"device": {"slots": 500}, "host": {}, "device_limit": 1000, "host_limit": None}
    about = {
        "settings": {"device": "auto", "lora_rank": 4},
        "plan": {"memory": memory, "shared": False, "machine": {"name": "cpu"}},
    }
    page = html(Run(tmp_path, rows, about, [], ""))
    assert "<figcaption>extra" in page
    assert "<figcaption>time" not in page and "<figcaption>num_tokens" not in page
    assert "rank 4, on cpu" in page and "on auto" not in page
    assert "More was measured than planned" in page
