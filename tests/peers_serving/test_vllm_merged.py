"""A real vLLM on the CPU serves models that `lema merge` wrote, dense and of experts: the
log-probabilities of prompts are those of PEFT's model with the adapter.
"""

from pathlib import Path

import pytest
from servedmodels import DENSE, ROWS, difference, log_probabilities, measured, model_of, trained
from vllmserver import vllm_server

from lema.convert import merge_adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("model_type", [*DENSE, "mixtral", "qwen3_moe", "gpt_oss"])
def test_a_merged_model_has_the_log_probabilities_of_peft(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type, tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged")
    expected = log_probabilities(model, adapter)
    assert difference(log_probabilities(model), expected) > 0.1
    images = ["--language-model-only"] if model_type == "idefics3" else []
    with vllm_server([f"--model={tmp_path / 'merged'}", *images], tmp_path / "log") as server:
        answer = server.log_probabilities(str(tmp_path / "merged"), ROWS)
    measured(f"{model_type}, merged", difference(answer, expected))
