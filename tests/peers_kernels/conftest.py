"""liger-kernel is in an environment of its own (`tox -e kernels`); elsewhere there is nothing to
collect here.

Its kernels run on the CPU, by Triton's interpreter (`TRITON_INTERPRET=1`). That has neither the
functions of a device's library, nor scalar arguments with the dtype that a compiled kernel gives
them, so both are put in here.
"""

import os
from importlib.util import find_spec

collect_ignore = ["test_liger.py"]

if find_spec("liger_kernel") and os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = []

    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt

    def with_dtype(value):
        if isinstance(value, float):
            return tl.tensor(
                interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32),
                tl.float32,
            )
        return converted(value)

    interpreter._implicit_cvt = with_dtype
    # looked up at the call, because the interpreter replaces it then
    rms_norm.rsqrt = lambda one: tl.rsqrt(one)
    geglu.tanh = lambda one: 2 * tl.sigmoid(2 * one) - 1
