"""Tasks of lm-evaluation-harness on a streamed model are those of the harness's own model of the
whole one.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from clirun import config_writer, lema
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from smallrun import NUM_LAYERS, SENTENCES, opened, settings, tokenizer, whole_model, write_model

from lema.errors import ConfigError
from lema_tools.evaluation.harness import Harness, evaluate_tasks, harness_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

LONG = " ".join(SENTENCES * 2)
CHOICES = """
task: mill_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WORDS = """
task: mill_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""
TEXTS = """
task: mill_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["4"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"{text} and",
            "choices": [" corn", " the mill by the river", " 7"],
            "answer": number % 3,
        }
        for number, text in enumerate(SENTENCES[:9])
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in {"choice": CHOICES, "words": WORDS, "texts": TEXTS}.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


@pytest.fixture
def pair(base: Path, tmp_path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """The streamed model, the harness's view of it, and the harness's own model of the whole
    one.
    """
    with opened(settings(base, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        encode = tokenizer()
        whole = whole_model(base, tmp_path / "adapter")
        yield (
            model,
            harness_model(model),
            HFLM(pretrained=whole, tokenizer=encode, batch_size=4, device="cpu"),
        )


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)
    ]  # type: ignore[arg-type]


def test_log_likelihoods_are_the_harness_s_own(pair: tuple[Any, Any, Any]) -> None:
    model, ours, theirs = pair
    pairs = [(text[: 5 + n], text[5 + n :]) for n, text in enumerate(SENTENCES)]
    pairs += [
        ("", "corn by the river"),
        ("the miller ", "grinds"),
        ("corn " * 90, "by the mill"),
        ("mill", " 4 4 4"),
    ]
    pairs += [(text, theirs.tok_decode([token])) for text in SENTENCES[:4] for token in (8, 40)]
    requests = asked("loglikelihood", *pairs)
    before = model.memory.counters.leases
    found = ours.loglikelihood(requests)
    # a new stream counts from nothing: one pass for all
    assert model.memory.counters.leases - before <= NUM_LAYERS
    expected = theirs.loglikelihood(requests)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-5, rel=1e-6
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_whole_texts_are_scored_in_the_harness_s_windows(pair: tuple[Any, Any, Any]) -> None:
    _, ours, theirs = pair
    requests = asked("loglikelihood_rolling", (LONG,), (SENTENCES[0],), ("corn",))
    found = ours.loglikelihood_rolling(requests)
    expected = theirs.loglikelihood_rolling(requests)
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)
    assert len(ours.tok_encode(LONG)) > 2 * ours.max_length == 2 * theirs.max_length


def test_texts_end_where_the_harness_ends_them(pair: tuple[Any, Any, Any]) -> None:
    _, ours, theirs = pair
    free = {"until": ["never"], "max_gen_toks": 8, "do_sample": False}
    made = theirs.generate_until(
        asked("generate_until", *((text, dict(free)) for text in SENTENCES[:3]))
    )
    stop = next(text[2:3] for text in made if len(text) > 3)
    short = {"until": [stop], "max_gen_toks": 5, "temperature": 0.0}
    arguments = [(text, dict(one)) for text in SENTENCES[:5] for one in (free, short)] + [
        ("corn " * 90, dict(free))
    ]
    requests = asked("generate_until", *arguments)
    found = ours.generate_until(requests)
    assert found == theirs.generate_until(requests)
    assert any(found)


@pytest.mark.parametrize("options", [{}, {"num_fewshot": 1, "limit": 5}])
def test_tasks_have_the_harness_s_metrics(
    tasks: Path, options: dict[str, Any], pair: tuple[Any, Any, Any]
) -> None:
    model, _, theirs = pair
    names = ["mill_choice", "mill_words", "mill_texts"]
    told = list[str]()
    found = evaluate_tasks(
        model, names, Harness(include_path=tasks, batch_size=3, **options), told.append
    )
    expected = lm_eval.simple_evaluate(
        model=theirs,
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks)),
        log_samples=False,
        **options,
    )
    assert expected is not None
    for name in names:
        ours = found["results"][name]
        whole = expected["results"][name]
        assert ours.keys() == whole.keys()
        for metric, value in whole.items():
            assert ours[metric] == (
                pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            )
    number = options.get("limit", 9)
    assert f"{3 * number} of {3 * number} rows scored" in told


def test_a_pass_over_the_weights_serves_every_request(base: Path, tmp_path: Path) -> None:
    requests = asked("loglikelihood", *((f"the miller {n}", f" grinds {n}") for n in range(1000)))
    with opened(settings(base, tmp_path)) as model:
        before = model.memory.counters.bytes_read  # of what lies outside the layers
        harness_model(model).loglikelihood(requests)
        counters = model.memory.counters
        assert counters.leases == NUM_LAYERS
        assert counters.bytes_read - before == sum(
            layer.read_bytes for layer in model.memory.layers
        )
        harness_model(model, Harness(rows_per_pass=300)).loglikelihood(requests)
        assert model.memory.counters.leases == math.ceil(1000 / 300) * NUM_LAYERS


def test_the_command_prints_and_writes_the_results(
    base: Path, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write: Callable[..., Path] = config_writer(base, tmp_path)
    out = tmp_path / "results.json"
    options = ["--include-path", tasks, "--limit", 4, "--output", out]
    assert lema("eval", write(), "--tasks", "mill_choice,mill_words", *options) == 0
    printed, said = capfd.readouterr()
    assert "mill_choice" in printed
    assert "acc_norm" in printed
    assert "12 of 12 rows scored" in said
    assert set(json.loads(out.read_text())["results"]) == {"mill_choice", "mill_words"}
    assert lema("eval", write(), "--tasks", "mill_choise", *options) == 2
    assert "no task of this name: mill_choise" in capfd.readouterr().err


def test_too_many_new_tokens_are_refused(pair: tuple[Any, Any, Any]) -> None:
    _, ours, _ = pair
    with pytest.raises(ConfigError, match="128 positions"):
        ours.generate_until(
            asked("generate_until", ("corn", {"until": ["x"], "max_gen_toks": 128}))
        )
