"""TRL's trainers with a streamed model on the second device: the losses are those of the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import seconddevice
from trlruns import save

PROGRAM = """
import os
import sys
from pathlib import Path
import seconddevice
seconddevice.install()
import torch
from accelerate.state import AcceleratorState
from torch.nn.attention import SDPBackend, sdpa_kernel
from trlruns import outcome, streamed_model, trainer_of
import lema, trlruns

model, kind, place = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
losses = []
for device in ("second", "cpu"):
    os.environ["ACCELERATE_TORCH_DEVICE"] = device  # the trainer's device, where it would find others itself
    AcceleratorState._reset_state(reset_partial_state=True)
    streamed = lema.streamed(model, trlruns.lora(), device=device, seed=trlruns.SEED)
    with sdpa_kernel(SDPBackend.MATH):
        run = trainer_of(kind, streamed, place / device, max_steps=4, optim="sgd", learning_rate=0.05, use_cpu=False)
        losses.append(outcome(run)[0])
    streamed.close()
apart = max(abs(one - other) / abs(other) for one, other in zip(*losses, strict=True))
assert len(losses[0]) == 4 and apart < 1e-5, losses
print("equal")
"""


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_losses_are_those_of_the_cpu(tmp_path: Path, kind: str) -> None:
    """In a process of its own, because a device that torch knows is known for the rest of it."""
    seconddevice.built_or_skipped()
    here = Path(__file__).parent
    paths = [
        str(here),
        str(here.parent),
        str(here.parent / "support"),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(save("llama", tmp_path / "model")),
        kind,
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]
