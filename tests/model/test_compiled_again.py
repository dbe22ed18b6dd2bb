"""What was compiled is kept: a second start makes no kernel, and computes the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lema.model.layers.compiled import CACHE

START = """
import json, torch
from torch import nn
from torch._dynamo.utils import counters
from lema.model.layers.compiled import CompiledLayers
from lema_cpu import CpuBackend

torch.manual_seed(0)
layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(8))
compiled, hidden = CompiledLayers(layers, "layers", CpuBackend()), torch.ones(2, 8, requires_grad=True)
for index in range(len(layers)):
    hidden = compiled.call(index, {}, (hidden,), {})
hidden.sum().backward()
gradient = float(layers[0][0].weight.grad.double().norm())
found = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
print(json.dumps({"gradient": gradient, "graphs": compiled.compilations, **found}))
"""


def started(cache: Path) -> dict[str, Any]:
    """Run compiled layers in a process of its own, with a cache directory of a user; return what
    it counted.
    """
    environment = {name: value for name, value in os.environ.items() if name != CACHE}
    environment |= {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", START]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    first = started(tmp_path)
    second = started(tmp_path)
    assert first["graphs"] == second["graphs"] == 1 and first["gradient"] == second["gradient"] > 0
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_miss"] == 0 < second["fxgraph_cache_hit"]
    assert any((tmp_path / "lema" / "compiled").iterdir())
