"""The examples of docs/trainers.md and docs/rewards.md run as they stand, with a tiny model in the hub's cache under
the real id.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from generationserver import generation_server
from hubcache import files_of, write_cache
from trlruns import DPO_ROWS, SFT_ROWS, save

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("trainers.md", "rewards.md"))
URL = "http://localhost:8000"  # of the server of an example
MODEL = "Qwen/Qwen3-32B"  # of every example
ROWS = 8  # the prompts of a batch of GRPO

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")
]


def block(name: str) -> str:
    (text,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL)
    return str(text)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's cache, with a tiny model under the id of the examples."""
    directory = tmp_path_factory.mktemp("hub")
    write_cache(directory / "cache", files_of(save("llama", directory / "model")), name=MODEL)
    return directory / "cache"


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("sft example", {"dataset": SFT_ROWS}),
        ("reward example", {"preferences": DPO_ROWS}),
        (
            "grpo example",
            {"prompts": [{"prompt": row["prompt"]} for row in DPO_ROWS], "reward": reward},
        ),
        (
            "served example",
            {"prompts": [{"prompt": row["prompt"]} for row in DPO_ROWS], "reward": reward},
        ),
        ("mixin example", {"dataset": SFT_ROWS}),
    ],
)
def test_an_example_trains(
    name: str, names: dict[str, Any], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's later examples use what the first one imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    files = cache.parent / "model"
    given = {
        key: Dataset.from_list(rows[:ROWS]) if isinstance(rows, list) else rows
        for key, rows in names.items()
    }
    imports = block("sft example").partition("\n\n")[0]
    short = {"GRPOConfig": {"max_completion_length": 4}}
    for one in ("SFTConfig", "RewardConfig", "GRPOConfig"):  # by default they ask for bf16 on a GPU
        changes = {"use_cpu": True, "max_steps": 1, **short.get(one, {})}
        monkeypatch.setattr(trl, one, partial(getattr(trl, one), **changes))
    space: dict[str, Any] = {"arguments": trl.SFTConfig("output"), **given}
    with generation_server(files) as server:
        exec(imports + "\n" + block(name).replace(URL, server.url), space)
    assert [*Path("output").glob("checkpoint-*/adapter_model.safetensors")]
