"""Which events a callback is told of, when."""

from typing import Any

from transformers import TrainerCallback

__all__ = ["Recorder"]


class Recorder(TrainerCallback):
    """Notes every event but those of single batches, which a layer-major step does not have."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float, str]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in ("on_substep_end", "on_prediction_step"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **details: Any) -> None:
            kinds = {"loss", "eval_loss", "train_loss"} & (
                details.get("logs") or details.get("metrics") or {}
            ).keys()
            self.events.append((name, state.global_step, state.epoch or 0.0, ",".join(kinds)))

        return note
