"""The optimizer and what its learning rate follows: torch's AdamW, transformers' schedules and
our own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import SchedulerType, get_scheduler

from lema.backend import Replicas
from lema.backend.registry import has_addresses
from lema.config import LemaConfig
from lema.engine.schedules import factor_of, spans_of, trainer_warmup
from lema.errors import ConfigError

__all__ = [
    "check_optimizer",
    "follow",
    "make_optimizer",
    "make_schedule",
    "set_rates",
    "set_update",
    "trainer_factor",
    "training_bytes",
]
__all__ += ["divided", "moments_elsewhere", "own_share", "step_share"]

AUTO_WARMUP = 0.03
"""The share of all steps that `warmup_steps: auto` is, which is axolotl's rule."""
MOST_AUTO_WARMUP = 100

DeviceDtype: TypeAlias = tuple[torch.device, torch.dtype]


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    config: LemaConfig,
    model: nn.Module | None = None,
    names: Iterable[str] | None = None,
    replicas: Replicas | None = None,
) -> Optimizer:
    """Return the optimizer that `optim` names, with the config's settings; by default it is AdamW
    (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101). On a device that has it, AdamW's
    update is one kernel, which reads there whether gradients overflowed. In host memory it is the
    plain one, whose bits do not depend on the processor. `ConfigError`: a parameter is in float16,
    or there is no such optimizer here. `model`: in which they have names, by which biases and norms
    are known: as in `transformers.Trainer` their weights do not decay. None: all decay. `names`: of
    the parameters, in their order, where they stand for those of the model; None: they are its own.
    `replicas`: over which its state is to be divided; None: this process has all."""
    trained = list(parameters)
    _check_precision(trained)
    device_dtypes = {(parameter.device, parameter.dtype) for parameter in trained}
    kind, options = _kind_of(config, device_dtypes)
    if config.loraplus_lr_ratio is not None and isinstance(model, PeftModel):
        ratio = config.loraplus_lr_ratio
        decay = config.weight_decay
        options |= {"loraplus_lr_ratio": ratio, "loraplus_weight_decay": decay}
        optimizer = create_loraplus_optimizer(model, kind, **options)
        _mark(optimizer, config)
        return optimizer
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": config.weight_decay}]
    if model is not None:
        exempt = _without_decay(model)
        names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        parameter_names = (
            [names_by_id[id(parameter)] for parameter in trained] if names is None else list(names)
        )
        decayed = [
            parameter
            for parameter, name in zip(trained, parameter_names, strict=True)
            if name not in exempt
        ]
        undecayed = [
            parameter
            for parameter, name in zip(trained, parameter_names, strict=True)
            if name in exempt
        ]
        groups[0]["params"] = decayed
        groups += [{"params": undecayed, "weight_decay": 0.0}] if undecayed else []
    optimizer = kind([group for group in groups if group["params"]], **options)
    _mark(optimizer, config)
    if kind is AdamW and not all(has_addresses(device) for device, _ in device_dtypes):
        _begin(optimizer, None if replicas is None else own_share(optimizer, replicas))
    return optimizer


def _without_decay(model: nn.Module) -> set[str]:
    """Name the parameters whose weights `transformers.Trainer` does not decay: biases, and those
    of norms.
    """
    from transformers import Trainer

    # of its own it needs nothing
    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    return {name for name, _ in model.named_parameters()} - decayed


def _mark(optimizer: Optimizer, config: LemaConfig) -> None:
    """Note in each parameter group what sets it apart, so that changed settings reach it in the
    same proportion.
    """
    for group in optimizer.param_groups:
        group["lr_ratio"] = (
            float(group["lr"]) / config.learning_rate if config.learning_rate else 1.0
        )
        group["decays"] = group.get("weight_decay", 0.0) == config.weight_decay


def _kind_of(
    config: LemaConfig, device_dtypes: Collection[DeviceDtype]
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and its arguments: but for AdamW those that
    `transformers.Trainer` gives it.
    """
    if config.optim == "adamw_torch":
        fused = (
            all(
                device.type != "cpu" and _has_fused_kernel(device, dtype)
                for device, dtype in device_dtypes
            )
            or None
        )
        betas = (config.adam_beta1, config.adam_beta2)
        update = {"lr": config.learning_rate, "betas": betas, "eps": config.adam_epsilon}
        return AdamW, {**update, "weight_decay": config.weight_decay, "fused": fused}
    from transformers import Trainer

    names = (
        "learning_rate",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "weight_decay",
        "optim_args",
    )
    arguments = SimpleNamespace(
        optim=config.optim, **{name: getattr(config, name) for name in names}
    )
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(cast(Any, arguments))
    except (ImportError, ValueError, TypeError) as error:
        how = "install its library, correct optim_args, or remove optim to use AdamW"
        raise ConfigError(
            f"this optimizer fails: {error}", where=f"optim: {config.optim}", how=how
        ) from error
    options.pop("weight_decay", None)  # each group has its own
    return kind, options


def _begin(optimizer: Optimizer, local_indices: set[int] | None) -> None:
    """Give AdamW its initial state (of the parameters at `local_indices`, where it is divided),
    because a lazy device would need a graph for the first step alone to make it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, parameter in enumerate(parameters):
        if local_indices is None or index in local_indices:
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
            state[index] = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def set_update(optimizer: Optimizer, config: LemaConfig) -> None:
    """Let an optimizer that `make_optimizer` made, and that was restored since, update as the
    config says now.
    """
    update = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    for group in optimizer.param_groups:
        group.update(
            {
                name: value
                for name, value in update.items()
                if name in group and config.optim == "adamw_torch"
            }
        )
        if group.get("decays", True):
            group["weight_decay"] = config.weight_decay
        group.pop("initial_lr", None)  # a schedule goes by that
    set_rates(
        optimizer,
        [config.learning_rate * group.get("lr_ratio", 1.0) for group in optimizer.param_groups],
    )


def _has_fused_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has one kernel for the whole update there: a step is tried, since torch
    tells nowhere.
    """
    probe = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        AdamW([probe], fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that cannot train. `ConfigError`: it has none of `parameters`, or one
    is in float16.
    """
    _check_precision(parameters)
    parameter_ids = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    if parameter_ids.isdisjoint(id(parameter) for parameter in parameters):
        what = "the optimizer has none of the adapter's parameters, so it would train nothing"
        raise ConfigError(
            what, how="create it with model.get_trainable_parameters(), after initialize_lora()"
        )


def _check_precision(parameters: Sequence[nn.Parameter]) -> None:
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ConfigError(
            (
                "biases and modules that train whole have the type of the weights, and float16 "
                "is too coarse for training"
            ),
            where="dtype: float16",
            how="set dtype to bfloat16 or float32, or leave lora_bias and lora_modules_to_save out",
        )


def training_bytes(model: nn.Module, layers_name: str) -> int:
    """Return the device memory that what trains takes: value, gradient and two moments of each
    parameter, in its type. A gradient is formed before it is added to what is there. Outside the
    layers one can be as large as embeddings."""
    trained = {
        name: parameter.nbytes
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    outside = [nbytes for name, nbytes in trained.items() if not name.startswith(f"{layers_name}.")]
    return 4 * sum(trained.values()) + max(outside, default=0)


def divided(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide parameters of these sizes over so many processes, each a whole one: the largest first,
    to the process that has least so far. Return the places of each process's."""
    shares: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(shares, key=lambda share: sum(sizes[member] for member in share)).append(index)
    return shares


def own_share(optimizer: Optimizer, replicas: Replicas) -> set[int]:
    """Return the places of the parameters that this process updates where the optimizer's state
    is divided.
    """
    return set(_shares(optimizer, replicas)[replicas.rank])


def _shares(optimizer: Optimizer, replicas: Replicas) -> list[list[int]]:
    return divided(
        [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]],
        replicas.size,
    )


@torch.no_grad()
def step_share(optimizer: Optimizer, replicas: Replicas, step: Callable[[], object]) -> None:
    """Have `step` update this process's share of the parameters, and every process get all: ZeRO's
    first stage (https://arxiv.org/abs/1910.02054). Gradients are those of all processes already,
    the same in each. Not torch's `ZeroRedundancyOptimizer`, because that needs a process group
    where the seam has `Replicas`, which not every device makes of one, and because its state leaves
    the others' processes only pickled."""
    parameters: list[nn.Parameter] = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    shares = [[parameters[index] for index in share] for share in _shares(optimizer, replicas)]
    remote = [
        (parameter, parameter.grad)
        for rank, share in enumerate(shares)
        if rank != replicas.rank
        for parameter in share
    ]
    for parameter, _ in remote:
        parameter.grad = None  # so that it is left alone, and has no state
    try:
        step()
    finally:
        for parameter, gradient in remote:
            parameter.grad = gradient
    for rank, share in enumerate(shares):
        stepped = sorted(
            (parameter for parameter in share if parameter.grad is not None),
            key=lambda parameter: str(parameter.dtype),
        )
        for dtype, alike in groupby(stepped, key=lambda parameter: parameter.dtype):
            sent = list(alike)
            if rank == replicas.rank:
                flat = torch.cat([parameter.reshape(-1) for parameter in sent])
            else:  # -0.0, because that and any number are this number, to the last bit
                flat = torch.full(
                    (sum(parameter.numel() for parameter in sent),),
                    -0.0,
                    dtype=dtype,
                    device=sent[0].device,
                )
            replicas.sum(flat)
            for parameter, new in zip(
                sent, flat.split([parameter.numel() for parameter in sent]), strict=True
            ):
                parameter.copy_(new.view_as(parameter))


def moments_elsewhere(model: nn.Module, count: int) -> int:
    """Return the bytes of AdamW's state that a process does not hold where it is divided over so
    many.
    """
    sizes = [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]
    return 2 * (
        sum(sizes) - max(sum(sizes[index] for index in share) for share in divided(sizes, count))
    )


def make_schedule(
    optimizer: Optimizer, config: LemaConfig, num_steps: int, step: int = 0
) -> LRScheduler:
    """Return the config's schedule over `num_steps` optimizer steps; `step` of them have been
    taken. `ConfigError`: the schedule needs settings that the config does not have, or its parts
    are longer than the run."""
    name = config.lr_scheduler_type
    if name not in {scheduler_type.value for scheduler_type in SchedulerType}:
        try:
            spans = spans_of(
                name, num_steps, warmup=config.warmup_steps or config.warmup_ratio or None
            )
        except ConfigError as error:
            where = "warmup_ratio" if config.warmup_ratio else "warmup_steps"
            raise ConfigError(
                error.what, where=where, how=f"lower {where}, or train for more steps"
            ) from error
        return follow(optimizer, factor_of(name, num_steps, spans), step=step)
    warmup = num_warmup_steps(config, num_steps)
    schedule = _trainers(optimizer, name, num_steps, warmup, config.lr_scheduler_kwargs)
    return _at_step(schedule, step)


def trainer_factor(
    name: str, num_steps: int, warmup: int, kwargs: dict[str, Any] | None = None
) -> Callable[[int], float]:
    """Return the factor of a `transformers` schedule as a function of the step, counted from 0.

    Args:
        name: the schedule, by the name of `transformers`.
        num_steps: the optimizer steps of the schedule.
        warmup: the steps in which the rate rises.
        kwargs: further arguments of the schedule.

    Raises:
        ConfigError: it follows the loss, or needs other arguments.
    """
    schedule = _trainers(AdamW([nn.Parameter(torch.zeros(1))]), name, num_steps, warmup, kwargs)
    (factor,) = schedule.lr_lambdas
    return factor


def _trainers(
    optimizer: Optimizer,
    name: str,
    num_steps: int,
    warmup: int,
    kwargs: dict[str, Any] | None,
) -> LambdaLR:
    """Return a schedule of `transformers`, at its first step."""
    if name in ("reduce_lr_on_plateau", "greedy"):
        what = "a schedule that follows the loss is not supported"
        how = "use one that is a function of the step, such as cosine"
        raise ConfigError(what, where=f"lr_scheduler_type: {name}", how=how)
    try:
        schedule = get_scheduler(name, optimizer, warmup, num_steps, kwargs)
    except (ValueError, TypeError) as error:
        what = f"this schedule needs further settings: {error}"
        how = (
            "give them as lr_scheduler_kwargs: {...}, by transformers' names, or use linear, "
            "cosine or constant"
        )
        raise ConfigError(what, where=f"lr_scheduler_type: {name}", how=how) from error
    assert isinstance(schedule, LambdaLR)
    return schedule


def num_warmup_steps(config: LemaConfig, num_steps: int) -> int:
    """Return the optimizer steps of the warm-up of a run of `num_steps`."""
    if config.warmup_ratio:
        return trainer_warmup(config.warmup_ratio, num_steps, config.warmup_rounding)
    if config.warmup_steps is None:
        steps = min(int(AUTO_WARMUP * num_steps), MOST_AUTO_WARMUP)
        return 2 if steps == 1 else steps  # with one, the first step has a rate of 0 alone
    return config.warmup_steps


def follow(
    optimizer: Optimizer,
    factor: Callable[[int], float],
    learning_rate: float | None = None,
    step: int = 0,
) -> LambdaLR:
    """Make an optimizer follow a schedule; `step` of its steps have been taken. A parameter group
    remembers the first learning rate it was ever scheduled with, and torch's schedules go by it. An
    optimizer that is carried into a phase would keep that of the phase before; so it is forgotten
    here. `factor`, of the step counted from 0, is of `learning_rate`; None: of what each group has.
    """
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
    if learning_rate is not None:
        set_rates(
            optimizer,
            [learning_rate * group.get("lr_ratio", 1.0) for group in optimizer.param_groups],
        )
    return _at_step(LambdaLR(optimizer, factor), step)


def _at_step(schedule: LambdaLR, step: int) -> LambdaLR:
    """Have a schedule stand where so many steps lead it."""
    if step:
        # As a state that is loaded, because stepping it so often would warn that the optimizer was
        # not stepped first.
        rates = [
            base * factor(step)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        state = {
            "last_epoch": step,
            "_step_count": step + 1,
            "_last_lr": rates,
            "lr_lambdas": [None] * len(rates),
        }
        schedule.load_state_dict(state)
        set_rates(schedule.optimizer, rates)
    return schedule


def set_rates(optimizer: Optimizer, rates: Sequence[float | Tensor]) -> None:
    """Set the learning rate of each parameter group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if hasattr(group["lr"], "fill_"):
            # read on the device by captured or compiled steps: it must stay the same tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
