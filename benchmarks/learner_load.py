"""Sixteen clients train on one learner for minutes, while it and they are killed at random.

    OMP_NUM_THREADS=1 python benchmarks/learner_load.py --minutes 10 --kills 20

`lema serve-learner` runs in a process of its own, with a tiny random Llama on the CPU. Clients have
secrets and ranks (8 to 64) of their own. Each sends rows and an optimizer step, waits for both
answers, and goes on; every few steps it saves its state. In the first half of the time the server
is killed (`kill -9`) and started again, and clients are: one that dies leaves what it has sent, and
another begins a new session with its last state. In the second half nobody is killed, and memory,
latency and fairness are measured.

The rows of a step are a function of client and step, so a step that is lost or done twice changes
all norms of gradients after it. So each norm that a client was answered is compared with what it
was answered before, and at the end those of `--verify` clients with a learner that nobody killed
and nobody else used: bit for bit. *Growth* is the anonymous memory of the server at the end by that
at the beginning of the second half; *latency* is of rows and step together, as multiples of the
median; *fairness* is the fewest steps of a client by the most.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, memory_kinds, print_machine

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from learnerclient import Answer, Client, rows_body
from learnerprocess import LearnerProcess
from tiny import VOCABULARY, write_checkpoint

from lema.train.learner.adapter import AdamSettings, AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum

RATE = 1e-3
SAVE_EVERY = 5  # steps
LENGTHS = (24, 17, 31, 20)  # tokens of the rows of a step
MICRO_BATCH = 64
AGAIN = (408, 429, 503, 507)  # statuses upon which the API's own client asks again
ASK_TWICE = 0.1  # of the answers are asked for once more


def rows_of(client: int, step: int) -> list[Datum]:
    """Return the rows of a client's step."""
    generator = torch.Generator().manual_seed(100_000 * client + step)
    data = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (length + 1,), generator=generator)
        data.append(Datum(ids[:-1], ids[1:], {"weights": torch.ones(length)}))
    return data


def rank_of(client: int, clients: int) -> int:
    """Return the rank of a client's adapter, of 8 to 64."""
    return 8 + (56 * client) // max(1, clients - 1)


class Killed(Exception):
    """A client dies."""


class LoadClient(threading.Thread):
    """One client, who may be killed and comes back."""

    def __init__(self, number: int, rank: int, port: int, secret: str, end: float) -> None:
        super().__init__(name=f"client{number}")
        self.number = number
        self.rank = rank
        self.norms: list[float] = []
        self.waits: list[tuple[float, float]] = []  # when each step ended, and how long it took
        self.deaths = 0
        self.asked_again = 0
        self.error: Exception | None = None
        self.to_die = threading.Event()
        self._client = Client(port, secret)
        self._end = end
        self._drawn = random.Random(number)
        self._saved: tuple[str, int] | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self._end:
                try:
                    self._live()
                except Killed:
                    self.deaths += 1
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.error = error

    def _live(self) -> None:
        """Train in one session, until the end or death."""
        asked: dict[str, Any] = {"tags": [], "sdk_version": "0"}
        session = self._insist(lambda: self._client.post("create_session", **asked)).json
        named = {"session_id": session["session_id"], "model_seq_id": 0}
        step = 0
        if self._saved is None:
            lora = {"rank": self.rank, "seed": self.number}
            model = self._result("create_model", **named, base_model="tiny", lora_config=lora)
        else:
            path, step = self._saved
            model = self._result("load_weights", **named, path=path, optimizer=True)
        name = model["model_id"]
        seq_id = 1
        while time.monotonic() < self._end:
            self._step(name, seq_id, step)
            step += 1
            seq_id += 2
            if step % SAVE_EVERY == 0:
                saved = {"model_id": name, "seq_id": seq_id, "path": f"step{step}"}
                self._saved = self._result("save_weights", **saved)["path"], step
                seq_id += 1

    def _step(self, model: str, seq_id: int, step: int) -> None:
        began = time.monotonic()
        body = rows_body(model, seq_id, rows_of(self.number, step))
        rows = self._insist(lambda: self._client.rows(body)).json["request_id"]
        params = {"learning_rate": RATE}
        asked = {"model_id": model, "seq_id": seq_id + 1, "adam_params": params}
        stepped = self._insist(lambda: self._client.post("optim_step", **asked)).json["request_id"]
        if self.to_die.is_set():
            self.to_die.clear()
            raise Killed
        self._answer(rows)
        norm = float(json.loads(self._answer(stepped).body)["metrics"]["grad_norm:mean"])
        self.waits.append((time.monotonic(), time.monotonic() - began))
        if step < len(self.norms):
            assert self.norms[step] == norm, f"step {step} of {self.name} was another one before"
        else:
            assert step == len(self.norms), f"a step of {self.name} is missing before {step}"
            self.norms.append(norm)

    def _result(self, route: str, **asked: Any) -> Any:
        future = self._insist(lambda: self._client.post(route, **asked)).json["request_id"]
        return self._answer(future).json

    def _answer(self, future: str) -> Answer:
        answer = self._insist(lambda: self._client.post("retrieve_future", request_id=future))
        assert b'"error"' not in answer.body[:8], answer.body
        if self._drawn.random() < ASK_TWICE:
            again = self._insist(lambda: self._client.post("retrieve_future", request_id=future))
            assert again.body == answer.body, f"{future} was answered in two versions"
            self.asked_again += 1
        return answer

    def _insist(self, ask: Callable[[], Answer]) -> Answer:
        while True:
            try:
                answer = ask()
            except (OSError, HTTPException):
                time.sleep(0.05)
                continue
            if answer.status not in AGAIN:
                assert answer.status == 200, (answer.status, answer.body)
                return answer
            if answer.status != 408:
                time.sleep(0.05)


def kill_at_random(
    process: LearnerProcess, clients: Sequence[LoadClient], kills: int, seconds: float
) -> None:
    """Kill the server so many times in so many seconds, and as many clients."""
    drawn = random.Random(kills)
    began = time.monotonic()
    for moment in sorted(drawn.uniform(0.0, seconds) for _ in range(kills)):
        time.sleep(max(0.0, began + moment - time.monotonic()))
        process.kill()
        drawn.choice(clients).to_die.set()
        process.start()
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def counters(client: Client) -> dict[str, float]:
    """Return what the server has counted since its start."""
    lines = client.ask("GET", "/metrics").body.decode().splitlines()
    return {
        name.removeprefix("lema_learner_"): float(value)
        for name, _, value in (line.partition(" ") for line in lines if not line.startswith("#"))
    }


def verify(directory: Path, client: LoadClient) -> None:
    """Compare a client's norms with those of a learner that nobody killed."""
    learner = Learner.open(directory, device="cpu", micro_batch_tokens=MICRO_BATCH, longest=64)
    learner.add("one", AdapterSpec(client.rank, seed=client.number))
    for step, norm in enumerate(client.norms):
        learner.run([AdapterRows("one", rows_of(client.number, step), "cross_entropy")])
        own = learner.step("one", AdamSettings(learning_rate=RATE))
        assert own == norm, f"step {step} of {client.name} is not that of a learner alone"
    learner.close()


def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the clients, and return what was seen."""
    model = write_checkpoint("llama", folder / "model").streamed
    directory = folder / "kept"
    directory.mkdir(mode=0o700)
    secrets = [f"tml-{number:032d}" for number in range(arguments.clients)]
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text("".join(f"c{number} {secret}\n" for number, secret in enumerate(secrets)))
    options = ["--adapters", str(arguments.clients), "--max-rank", "64"]
    process = LearnerProcess(model, directory, [*options, "--micro-batch-tokens", str(MICRO_BATCH)])
    process.start()
    end = time.monotonic() + 60 * arguments.minutes
    clients = [
        LoadClient(number, rank_of(number, arguments.clients), process.port, secret, end)
        for number, secret in enumerate(secrets)
    ]
    try:
        for client in clients:
            client.start()
        kill_at_random(process, clients, arguments.kills, 30 * arguments.minutes)
        watcher = Client(process.port, secrets[0])
        half = time.monotonic()
        before = counters(watcher)
        sizes = [memory_kinds(process.pid)["anonymous"]]
        while time.monotonic() < end - 2.0:
            time.sleep(min(5.0, max(0.0, end - 2.0 - time.monotonic())))
            sizes.append(memory_kinds(process.pid)["anonymous"])
        after = counters(watcher)
        for client in clients:
            client.join()
    finally:
        process.stop()
    for client in clients:
        if client.error is not None:
            print(directory.with_suffix(".log").read_text(), file=sys.stderr)
            raise client.error
    for client in clients[:: max(1, len(clients) // max(1, arguments.verify))]:
        verify(model, client)
    return summary(clients, half, sizes, {k: after[k] - before.get(k, 0.0) for k in after})


def summary(
    clients: Sequence[LoadClient], half: float, sizes: Sequence[int], counts: dict[str, float]
) -> dict[str, Any]:
    """Return the numbers of a run."""
    if "passes_total" not in counts:
        raise SystemExit("no pass ended in the second half: give more --minutes")
    waits = sorted(wait for client in clients for at, wait in client.waits if at > half)
    steps = [sum(at > half for at, _ in client.waits) for client in clients]
    median = waits[len(waits) // 2]
    passes = counts["passes_total"]
    return {
        "steps": sum(len(client.norms) for client in clients),
        "deaths of clients": sum(client.deaths for client in clients),
        "answers asked for twice": sum(client.asked_again for client in clients),
        "steps in the second half": sum(steps),
        "passes in the second half": passes,
        "adapters in a pass": counts["pass_adapters_total"] / passes,
        "failed requests": counts.get("failed_requests_total", 0.0),
        "fairness": min(steps) / max(steps),
        "latency": {
            f"p{percent}": waits[min(len(waits) - 1, len(waits) * percent // 100)] / median
            for percent in (90, 99, 100)
        },
        "growth": sizes[-1] / sizes[0],
        "megabytes": [sizes[0] / 1e6, max(sizes) / 1e6, sizes[-1] / 1e6],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--verify", type=int, default=2, help="clients that are computed again")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        seen = measured(arguments, Path(folder))
    for name, value in seen.items():
        print(f"{name}: {value}")
    RESULTS.mkdir(exist_ok=True)
    record = {"benchmark": "learner_load", "machine": machine(), **vars(arguments), "seen": seen}
    (RESULTS / "learner_load.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
