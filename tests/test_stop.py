"""A signal lets the step under way finish, saves, and ends with code 75; what follows is as if nothing had happened."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_same_adapter, config_writer
from smallrun import write_model
from transformers import TrainerCallback

from lema.config import LemaConfig
from lema.errors import Stopped
from lema.stop import SIGNALS, StopOnSignal
from lema.train import train


class Kill(TrainerCallback):
    """Sends this process a signal while a step is under way."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number = step, number

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, number: signal.Signals) -> None:
    write = config_writer(write_model(tmp_path / "model"), tmp_path)
    changes: dict[str, Any] = {"max_steps": 4, "save_steps": 0, "lora_dropout": 0.1}
    whole = LemaConfig.from_yaml(write(**changes, output_dir=str(tmp_path / "whole")))
    train(whole)
    config = LemaConfig.from_yaml(write(**changes, output_dir=str(tmp_path / "cut")))
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped:
        train(config, callbacks=[Kill(2, number)])
    assert stopped.value.exit_code == 75
    assert stopped.value.where == str(tmp_path / "cut" / "checkpoint-2")
    assert signal.getsignal(number) is before
    train(config, resume=True)
    assert_same_adapter(tmp_path / "whole", tmp_path / "cut")


def test_a_signal_in_the_last_step_cuts_nothing_short(tmp_path: Path) -> None:
    write = config_writer(write_model(tmp_path / "model"), tmp_path)
    train(LemaConfig.from_yaml(write(max_steps=2)), callbacks=[Kill(2, signal.SIGTERM)])
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_a_second_signal_is_not_kept_back() -> None:
    started_with = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with StopOnSignal() as stop, pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.received is signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, started_with)
