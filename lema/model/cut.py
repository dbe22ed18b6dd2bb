"""Where the head of a model begins, found in what its own forward computes around layers that were replaced."""

from collections.abc import Callable

from torch import Tensor

from lema.model.capture import depends_on, tensors_in
from lema.model.flow import Tape

__all__ = ["CannotCut", "find_cut"]


class CannotCut(Exception):
    """Says why a model is no prelude, layers one after the other, and a head."""


def find_cut(tape: Tape, logits: Tensor, is_enough: Callable[[int, Tensor], bool]) -> int:
    """Return the number on the `tape` of the tensor that the head is given, of a whole forward that made `logits`.
    `is_enough` tells whether a head that is given the tensor of that number, with that value, needs nothing else.
    `CannotCut`: a layer's output cannot be followed, or there is no such tensor."""
    made = [tape.values[number] for call in tape.calls for number in call.returns if number in tape.values]
    for index, call in enumerate(tape.calls):
        if depends_on(tensors_in((call.args, call.kwargs)), made):
            raise CannotCut(f"layer {index} gets more from the layers below than LEMA can follow")
    for cut in tape.cuts(logits):
        tape.cut = cut
        if is_enough(cut, tape.values[cut].detach()):
            steps = [step for call in tape.tied() for step in call.after]
            if not all(step.differentiable for step in steps):
                raise CannotCut("between its layers it uses operations that autograd does not follow")
            # Of a size that is known only when the layers run.
            rest = {number for call in tape.calls for number in call.returns[1:]}
            if any(step.uses & rest for step in steps):
                raise CannotCut("between its layers it uses more than the hidden state")
            return cut
    raise CannotCut("its head needs more than the last layer's output, token by token")
