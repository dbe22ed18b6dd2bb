"""Runs on every rank: the cases one after the other; the first rank writes what each measured to
a file.
"""

import json
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from neuronlayers import layer_cases
from neuronmodels import model_cases

from lema_neuron.comm import C10dComm


def main(file: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))  # for a rank that failed alone
    comm = C10dComm()
    found = {}
    cases = {**layer_cases(comm.size), **model_cases(comm.size)}
    for name, case in ((name, cases[name]) for name in names):
        torch.manual_seed(0)
        try:
            measured: dict[str, float] | str = case(comm)
        except Exception:  # noqa: BLE001 - reported under its name; the other cases go on
            measured = traceback.format_exc()
        every: list[dict[str, float] | str] = [""] * comm.size
        dist.all_gather_object(every, measured)
        found[name] = every
    if comm.rank == 0:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()
