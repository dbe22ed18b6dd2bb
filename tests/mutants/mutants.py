"""Lines of the engine on which numbers depend, each with a change that must be noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """A change of one place in a file of `lema`, and the tests that fail with it."""

    name: str
    file: str
    line: str
    change: str
    tests: str  # pytest's arguments


@dataclass(frozen=True)
class _Tests:
    """Tests that are quick and see a kind of change."""

    steps: str = "tests/engine/test_stack.py -k a_step_is_that_of_the_whole_model"
    dropout: str = "tests/engine/test_parity_trained.py -k dropout_is_drawn"
    trained: str = "tests/engine/test_trained_weights.py -k gradients_of_weights_are_those"
    scaled: str = "tests/engine/test_layer_pass.py -k multiplied"
    ends: str = "tests/engine/test_parity_trained.py -k 'beside_the_matrices or train_as_one'"
    asked: str = "tests/train/hf/test_autograd_ways.py -k 'asked_for or differentiated_again'"
    objectives: str = "tests/engine/test_objectives.py -k loss_and_gradients_are_those"
    model_dropout: str = "tests/engine/test_objectives.py -k dropout_of_the_model"
    routers: str = "tests/engine/test_routers.py -k 'a_step_is_that or below_the_lowest'"
    groups: str = "tests/engine/test_expert_groups.py -k 'a_step_is_that or run_twice'"
    memory: str = (
        "tests/engine/test_oom.py -k 'fewer_slots or smaller_micro_batches or put_back "
        "or nothing_of_a_failed'"
    )
    prefix: str = "tests/engine/test_frozen_prefix.py"
    layer_pass: str = "tests/engine/test_layer_pass.py"
    state: str = "tests/loader/test_layer_state.py -k attempted_again"


SEEN_BY = _Tests()
WHOLE = "lema/engine/layers/whole.py"
EXPERTS = "lema/engine/layers/experts.py"
PASS = "lema/engine/layers/layer_pass.py"
TOP = "lema/engine/layers/top.py"
RECOMPUTE = "lema/engine/recompute.py"
HEAD = "lema/engine/head/gradients.py"
OOM = "lema/engine/oom.py"

MUTANTS = (
    Mutant(
        "a layer is recomputed with the generator's state of the backward",
        WHOLE,
        "            engine.backend.set_rng_state(state)\n            layer_input = boundary[0]",
        "            layer_input = boundary[0]",
        SEEN_BY.steps,
    ),
    Mutant(
        "leaves keep the slot of the forward",
        "lema/engine/trained_weights.py",
        "leaves[name].data = weight.detach()",
        "weight.detach()",
        SEEN_BY.trained,
    ),
    Mutant(
        "the last micro-batch's gradient of a weight stands for all",
        WHOLE,
        "weight.grad = formed if weight.grad is None else weight.grad.add_(formed)",
        "weight.grad = formed",
        SEEN_BY.trained,
    ),
    Mutant(
        "the second run of the top layer draws other numbers",
        WHOLE,
        "            if states is not None:\n                engine.backend.set_rng_state",
        "            if False:\n                engine.backend.set_rng_state",
        SEEN_BY.model_dropout,
    ),
    Mutant(
        "an input that needs a gradient has none",
        WHOLE,
        "layer_input = layer_input.detach().requires_grad_(needs)",
        "layer_input = layer_input.detach()",
        SEEN_BY.steps,
    ),
    Mutant(
        "what routers make has no gradient",
        WHOLE,
        "logits.detach().requires_grad_(logits.requires_grad) for logits in call.routers",
        "logits.detach() for logits in call.routers",
        SEEN_BY.routers,
    ),
    Mutant(
        "a layer that is not recomputed refers to the lease of the forward",
        RECOMPUTE,
        "            return self._lease.resolve(packed)",
        "            return packed",
        "tests/engine/test_stack.py -k 'a_step_is_that and checkpointing'",
    ),
    Mutant(
        "a graph that is kept is freed by its first backward",
        RECOMPUTE,
        "torch.autograd.backward(edges, gradients, retain_graph=again)",
        "torch.autograd.backward(edges, gradients)",
        "tests/train/hf/test_autograd_ways.py -k differentiated_again",
    ),
    Mutant(
        "the generator is not put back after the backward of a layer",
        PASS,
        "                engine.backend.set_rng_state(state)\n",
        "",
        SEEN_BY.dropout,
    ),
    Mutant(
        "only the lowest layer's inputs need a gradient",
        PASS,
        "needs = [True] * len(rows.states) if self._saved else needs_grad",
        "needs = needs_grad",
        SEEN_BY.steps,
    ),
    Mutant(
        "gradients that a caller asks for are not handed over",
        PASS,
        "*(() if outer is None else outer.handed_over())",
        "*(() if outer is None else [None] * len(outer.parameters))",
        SEEN_BY.asked,
    ),
    Mutant(
        "what a kept pass saved is let go of by its first backward",
        PASS,
        "        again = differentiated_again()",
        "        again = False",
        "tests/train/hf/test_autograd_ways.py -k differentiated_again",
    ),
    Mutant(
        "gradients of routers are not multiplied with those of hidden states",
        PASS,
        "number: [[_scaled(gradient, factor) for gradient in row] for row in rows]",
        "number: rows",
        "tests/engine/test_routers.py -k multiplied",
    ),
    Mutant(
        "the gradient of the pass's outputs is held until its end",
        PASS,
        "None if gradient is None else gradient.new_zeros(()).expand(gradient.shape)",
        "gradient",
        SEEN_BY.layer_pass,
    ),
    Mutant(
        "the gradient that arrives at the loss is not applied to the top layer",
        TOP,
        "(leaf, formed * factor) for leaf, formed in weight_gradients if formed is not None",
        "(leaf, formed) for leaf, formed in weight_gradients if formed is not None",
        SEEN_BY.scaled,
    ),
    Mutant(
        "the loss of rows is left out of the value",
        TOP,
        "formed.add_value(value)",
        "pass",
        SEEN_BY.objectives,
    ),
    Mutant(
        "rows of a reference are computed with the adapters that train",
        "lema/engine/layers/reference_rows.py",
        "    compute_as = partial(as_reference, start)",
        "    compute_as = None",
        SEEN_BY.objectives,
    ),
    Mutant(
        "the gradient of the head does not know the gradient of the loss",
        HEAD,
        "list(sums), [gradient * factor for gradient in sums.values()]",
        "list(sums), [*sums.values()]",
        SEEN_BY.scaled,
    ),
    Mutant(
        "an embedding that is the head as well gets two additions",
        HEAD,
        "        if self._before & self._after:\n            return\n",
        "",
        SEEN_BY.ends,
    ),
    Mutant(
        "gradients of experts' adapters stay in their groups",
        EXPERTS,
        "torch.autograd.backward([parameter], [adapters.pop(parameter)])  # adds to .grad",
        "adapters.pop(parameter)",
        SEEN_BY.groups,
    ),
    Mutant(
        "hidden states of a group get no gradient",
        EXPERTS,
        "routing.add(states, pairs, formed[0])",
        "pass",
        SEEN_BY.groups,
    ),
    Mutant(
        "tokens of a group lose the weight of their expert",
        EXPERTS,
        "factors.view(-1)[pairs.pairs] = formed[1].flatten()",
        "pass",
        SEEN_BY.groups,
    ),
    Mutant(
        "gradients of a pass that failed stay",
        OOM,
        "            _put_back(parameters, before)\n",
        "",
        SEEN_BY.memory,
    ),
    Mutant(
        "a pass that is attempted again draws other numbers",
        OOM,
        "            self._backend.set_rng_state(state)\n            self._state.put_back(mark)",
        "            self._state.put_back(mark)",
        SEEN_BY.memory,
    ),
    Mutant(
        "what layers keep goes on from the attempt that failed",
        OOM,
        "            self._state.put_back(mark)\n",
        "",
        SEEN_BY.state,
    ),
    Mutant(
        "numbers that were drawn below a prefix are not noticed",
        "lema/engine/streamed.py",
        "drawn=not torch.equal(drawn_before, self.backend.rng_state()),",
        "drawn=False,",
        SEEN_BY.prefix,
    ),
    Mutant(
        "the lowest layer that trains is left out of the way down",
        "lema/engine/streamed.py",
        "            return 0\n        trained = ",
        "            return 1\n        trained = ",
        SEEN_BY.ends,
    ),
)
