"""What LEMA predicts that a run spends device memory on, of a model that is open."""

from __future__ import annotations

from lema import LemaModel
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.optim import training_bytes
from lema.model.skeleton import find_layers
from lema.plan.memory import device_parts
from lema.plan.work.step import demand_of, step_shape
from lema.plan.work.workload import measure

__all__ = ["predicted_parts", "predicted_seconds"]


def predicted_parts(model: LemaModel) -> dict[str, int]:
    """Return the bytes of each part of the device's peak, as the plan counts them for the
    model's allocation.
    """
    name, stack = find_layers(model.skeleton)
    shape = step_shape(
        model.config, getattr(model.skeleton.config, "max_position_embeddings", None)
    )
    layers = model.memory.layers
    workload = measure(
        model.skeleton, layers, shape.micro_batch, model.config.loss_chunk_tokens or CHUNK_TOKENS
    )
    trained = (
        index
        for index, layer in enumerate(stack)
        if any(one.requires_grad for one in layer.parameters())
    )
    demand = demand_of(
        layers,
        workload,
        None,
        shape,
        outside_bytes=model.outer.nbytes,
        adapter_bytes=training_bytes(model.skeleton, name),
        lowest=next(trained, len(layers) - 1),
        shared=model.backend.memory().shared,
    )
    return device_parts(demand, model.allocation)


def predicted_seconds(model: LemaModel) -> float | None:
    """Return how long the plan says that a step takes; None: it measured no speeds, as it does
    without a limit.
    """
    planner = model.planner
    if planner.timings is None:
        return None
    return planner.simulated(planner.demand(), model.allocation).seconds
