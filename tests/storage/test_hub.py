"""What the user calls a model is sought on disk first; a hub id is found in the cache, fetched,
or refused clearly.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hubcache import COMMIT, write_cache
from safetensors.torch import save

from lema.errors import WeightsError
from lema.storage import GlobalBinaryIndex, resolve_model

WEIGHTS = save({"t": torch.arange(4.0)})
CODE = "modeling_tiny.py"
PUBLISHED = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "vocab.txt": b"a",
    "chat_template.jinja": b"x",
    "pytorch_model.bin": b"pickle",
    CODE: b"raise SystemExit",
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"the same again",
}
OFFLINE = {"HF_HUB_OFFLINE": "1"}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "chat_template.jinja"}


def resolve(name: str, cache: Path, *, environment: dict[str, str], **options: Any) -> Any:
    """Resolve in a fresh process: huggingface_hub reads its environment once, when it is
    imported.
    """
    code = (
        "import sys, json\nfrom lema.errors import LemaError\nfrom lema.storage.hub import "
        "resolve_model\n"
        "try: print(json.dumps(str(resolve_model(sys.argv[1], **json.loads(sys.argv[2])))))\n"
        "except LemaError as e: print(json.dumps({'class': type(e).__name__, 'what': "
        "e.what, 'how': e.how}))\n"
    )
    settings = {
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, name, json.dumps(options)],
        env=kept | settings | environment,
        cwd=cache.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """A hub on this machine: its address, the paths asked of it, and the error it shall answer
    with.
    """
    asked: list[str] = []
    failure: dict[str, str] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            content = b""
            if failure:
                self.send_response(int(failure["status"]))
                self.send_header("X-Error-Code", failure["code"])
                self.send_header("X-Error-Message", failure["code"])
            elif path.startswith("/api/models/org/tiny/tree/"):
                tree = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(data),
                        "oid": hashlib.sha1(data).hexdigest(),
                    }
                    for name, data in PUBLISHED.items()
                ]
                content = json.dumps(tree).encode()
                self.send_response(200)
            elif path.startswith("/api/models/org/tiny"):
                siblings = [{"rfilename": name} for name in PUBLISHED]
                content = json.dumps(
                    {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
                ).encode()
                self.send_response(200)
            else:
                content = PUBLISHED[path.partition(f"/resolve/{COMMIT}/")[2]]
                self.send_response(200)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked, failure
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_exists_on_disk_is_never_sent_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    file = tmp_path / "org" / "tiny" / "one.safetensors"
    file.write_bytes(WEIGHTS)
    assert resolve_model("org/tiny").samefile(file.parent)
    assert resolve_model(Path("org/tiny")).samefile(file.parent)
    assert resolve_model("~/org/tiny") == file.parent
    assert resolve_model(file) == resolve_model(str(file)) == file.parent


@pytest.mark.parametrize(
    "name", ["./gone", "../gone", "/gone/model", "~/gone", "gone.safetensors", Path("org/gone")]
)
def test_what_is_spelt_like_a_path_is_never_sent_to_the_hub(name: str | Path) -> None:
    loaded = "huggingface_hub" in sys.modules
    with pytest.raises(WeightsError, match="does not exist"):
        resolve_model(name)
    assert ("huggingface_hub" in sys.modules) == loaded


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"model\.bin is not a model"):
        resolve_model(tmp_path / "model.bin")


def test_a_cached_model_is_found_offline_and_its_links_are_sound(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path / "cache", {"config.json": b"{}", "model.safetensors": WEIGHTS})
    found = resolve("org/tiny", tmp_path / "cache", environment=OFFLINE)
    assert Path(found) == snapshot
    assert list(GlobalBinaryIndex(found)) == ["t"]
    assert resolve("org/tiny", tmp_path / "cache", revision=COMMIT, environment=OFFLINE) == found


def test_offline_without_the_model_in_the_cache_says_so(tmp_path: Path) -> None:
    answer = resolve("org/other", tmp_path / "cache", environment=OFFLINE)
    assert answer["class"] == "WeightsError"
    assert "'org/other' is not a local directory, is not in the hub cache" in answer["what"]
    assert "HF_HUB_OFFLINE" in answer["how"]


def test_a_hub_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    answer = resolve(
        "org/other", tmp_path / "cache", environment={"HF_ENDPOINT": "http://127.0.0.1:9"}
    )
    assert answer["class"] == "WeightsError" and "cannot be reached" in answer["what"]


@pytest.mark.parametrize("name", ["a/b/c", "what is this", "-x"])
def test_what_is_neither_a_path_nor_an_id_is_refused(tmp_path: Path, name: str) -> None:
    answer = resolve(name, tmp_path / "cache", environment=OFFLINE)
    assert (
        answer["class"] == "WeightsError"
        and "neither an existing directory nor a hub id" in answer["what"]
    )


def test_a_model_published_only_as_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_cache(tmp_path / "cache", {"config.json": b"{}"})
    answer = resolve("org/tiny", tmp_path / "cache", environment=OFFLINE)
    assert "no .safetensors weights" in answer["what"] and "save_pretrained" in answer["how"]


def test_only_weights_and_small_files_are_fetched(
    tmp_path: Path, hub: tuple[str, list[str], dict[str, str]]
) -> None:
    endpoint, asked, _ = hub
    found = Path(resolve("org/tiny", tmp_path / "cache", environment={"HF_ENDPOINT": endpoint}))
    assert {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()} == WANTED
    assert {
        path.partition(f"/resolve/{COMMIT}/")[2] for path in asked if "/resolve/" in path
    } == WANTED
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert list(GlobalBinaryIndex(found)) == ["t"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        ("404", "RepoNotFound", "the hub has no such model"),
        ("403", "GatedRepo", "only to accounts that accepted its terms"),
        ("404", "RevisionNotFound", "no such revision"),
        ("400", "BadRequest", "the hub answered: "),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(
    tmp_path: Path, hub: tuple[str, list[str], dict[str, str]], status: str, code: str, message: str
) -> None:
    endpoint, _, failure = hub
    failure.update(status=status, code=code)
    answer = resolve("org/tiny", tmp_path / "cache", environment={"HF_ENDPOINT": endpoint})
    assert answer["class"] == "WeightsError" and message in answer["what"] and answer["how"]


def test_code_is_fetched_with_a_commit_when_it_is_trusted(
    tmp_path: Path, hub: tuple[str, list[str], dict[str, str]]
) -> None:
    endpoint, asked, _ = hub
    found = resolve(
        "org/tiny",
        tmp_path / "cache",
        environment={"HF_ENDPOINT": endpoint},
        revision=COMMIT,
        trust_remote_code=True,
    )
    assert {
        path.partition(f"/resolve/{COMMIT}/")[2] for path in asked if "/resolve/" in path
    } == WANTED | {CODE}
    assert (Path(found) / CODE).read_bytes() == PUBLISHED[CODE]


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12]])
def test_code_that_is_not_pinned_is_not_even_asked_for(
    tmp_path: Path, hub: tuple[str, list[str], dict[str, str]], revision: str | None
) -> None:
    endpoint, asked, _ = hub
    answer = resolve(
        "org/tiny",
        tmp_path / "cache",
        environment={"HF_ENDPOINT": endpoint},
        revision=revision,
        trust_remote_code=True,
    )
    assert answer["class"] == "ConfigError" and "only from a commit" in answer["what"]
    assert asked == []


def test_what_must_not_be_downloaded_is_looked_for_in_the_cache_only(
    tmp_path: Path, hub: tuple[str, list[str], dict[str, str]]
) -> None:
    endpoint, asked, _ = hub
    online = {"HF_ENDPOINT": endpoint}
    answer = resolve("org/tiny", tmp_path / "cache", environment=online, download=False)
    assert "nor in the hub cache" in answer["what"] and "hf download org/tiny" in answer["how"]
    snapshot = write_cache(tmp_path / "cache", {"model.safetensors": WEIGHTS})
    assert (
        Path(resolve("org/tiny", tmp_path / "cache", environment=online, download=False))
        == snapshot
    )
    assert asked == []
