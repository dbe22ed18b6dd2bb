"""One of the two runs, in a process of its own: `python -m lema_tools.proof ARM CASE RESULT`."""

import json
import sys

from lema.cli.kernels import hide_kernels
from lema.config.printing import hush

if __name__ == "__main__":
    hide_kernels()
    hush()
    import torch

    from lema_tools.proof.arms import ARMS, Case

    name, case_json, result = sys.argv[1:]
    outcome = ARMS[name](Case(**json.loads(case_json)))
    torch.save(dict(vars(outcome)), result)
