"""Where in a model the forward is: at its head, in excluded modules; hooks that are put on once,
and taken off.
"""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import ARCHITECTURES, micro_batches
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from lema.activations.hooks import (
    Hooked,
    Hooks,
    ModelHooks,
    Scope,
    current,
    entered,
    output_head,
    wrapped,
)
from lema.errors import ConfigError


def whole(name: str = "llama", **varying: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(ARCHITECTURES[name].config(**varying))


def adapted(name: str = "llama", **settings: Any) -> nn.Module:
    fixed = {
        "target_modules": sorted(ARCHITECTURES[name].targets),
        "fan_in_fan_out": ARCHITECTURES[name].transposed,
    }
    return get_peft_model(whole(name), LoraConfig(**fixed | settings))


def hooks_on(model: nn.Module) -> dict[str, list[str]]:
    """The hooks of ours on every module that has any, those before and those after its forward."""
    found = {}
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        ours = [hook.__name__ for hook in hooks if hook.__module__.startswith("lema.")]
        if ours:
            found[name] = sorted(ours)
    return found


class Seen:
    """What the scope says at the moment each of some modules begins."""

    def __init__(self, *modules: nn.Module) -> None:
        self.scope = Scope()
        self.past_head: list[bool] = []
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self.past_head.append(self.scope.past_head))


class Named(nn.Module):
    """A model with its parts where a test puts them, that runs those named, one after the other."""

    def __init__(self, *run: str, **parts: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for path in self._run:
            x = self.get_submodule(path)(x)
        return x


class Tied:
    """A head without parameters, which calls a module of its own."""

    def __init__(self) -> None:
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)


class WithTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.output = Tied()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layer(x))


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def decoder(head: str) -> nn.Module:
    return Named("layer", head, layer=linear(), **{head: linear()})


class Replicated(nn.Module):
    """A wrapper as for several processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Module]]] = {
    "output": (
        lambda: Named("layer", "output", layer=linear(), output=linear()),
        lambda m: m.output,
    ),
    "output.linear": (WithTied, lambda m: m.output.linear),
    "lm_head": (
        lambda: Named("layer", "lm_head", layer=linear(), lm_head=linear()),
        lambda m: m.lm_head,
    ),
    "decoder.output": (
        lambda: Named("decoder", decoder=decoder("output")),
        lambda m: m.decoder.output,
    ),
    "decoder.lm_head": (
        lambda: Named("decoder", decoder=decoder("lm_head")),
        lambda m: m.decoder.lm_head,
    ),
    "final_layer_norm": (
        lambda: Named(
            "layer", "final_layer_norm", layer=linear(), final_layer_norm=nn.LayerNorm(4)
        ),
        lambda m: m.final_layer_norm,
    ),
    "ln_f": (
        lambda: Named("layer", "ln_f", layer=linear(), ln_f=nn.LayerNorm(4)),
        lambda m: m.ln_f,
    ),
    "head": (lambda: Named("layer", "head", layer=linear(), head=linear()), lambda m: m.head),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_is_found_in_every_layout_and_what_follows_is_the_loss(layout: str) -> None:
    make, head_of = LAYOUTS[layout]
    model = make()
    assert output_head(model) is head_of(model)
    sites = ModelHooks(model)
    assert sites.head
    scope = Scope()
    inside = []
    # The head itself is seen from within: its own hooks have run by then.
    head_of(model).register_forward_pre_hook(lambda *_: inside.append(scope.past_head))
    first = model.decoder.layer if layout.startswith("decoder") else model.layer
    first.register_forward_pre_hook(lambda *_: inside.append(scope.past_head))
    with entered(scope):
        for _ in range(2):  # the model's next forward is not the loss
            model(torch.ones(1, 4))
            assert scope.past_head
    assert inside == [False, True] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "wrap", [lambda model: model, Replicated, lambda model: Replicated(Replicated(model))]
)
@pytest.mark.parametrize("make", [whole, adapted])
def test_the_head_of_a_language_model_is_entered_once_after_the_layers(
    name: str, wrap: Callable[[nn.Module], nn.Module], make: Callable[[str], nn.Module]
) -> None:
    bare = make(name)
    model = wrap(bare)
    sites = ModelHooks(model)
    base = wrapped(model)[-1]
    layers = base.get_submodule(ARCHITECTURES[name].layers)
    seen = Seen(base.get_input_embeddings(), *layers, base.lm_head)
    with entered(seen.scope):
        for batch in micro_batches(2):
            model(**batch)
            assert seen.scope.past_head
    assert seen.past_head == ([False] * (1 + len(layers)) + [True]) * 2
    sites.close()


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}]
)
def test_a_head_that_was_replaced_is_found_as_it_is_called(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    head = output_head(model)
    assert (
        head is not None and head is wrapped(model)[-1].lm_head and not isinstance(head, nn.Linear)
    )
    sites = ModelHooks(model)
    scope = Scope()
    inside = []
    inner = [module for module in head.modules() if isinstance(module, nn.Linear)]
    for module in inner:
        module.register_forward_pre_hook(lambda *_: inside.append(scope.past_head))
    with entered(scope):
        model(**micro_batches(1)[0])
    assert inside and all(inside)
    sites.close()


def test_tied_embeddings_are_no_head_when_tokens_are_looked_up() -> None:
    model = whole(tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    sites = ModelHooks(model)
    seen = Seen(*model.model.layers)
    with entered(seen.scope):
        model(**micro_batches(1)[0])
    assert sites.head and not any(seen.past_head) and seen.scope.past_head


class WithEmbeddingAsHead(Named):
    def get_output_embeddings(self) -> nn.Module:
        return self.embedding


def test_a_head_that_is_the_embedding_itself_is_none() -> None:
    model = WithEmbeddingAsHead("embedding", embedding=nn.Embedding(4, 4))
    assert output_head(model) is None


def test_a_model_without_a_head_is_told() -> None:
    model = AutoModel.from_config(ARCHITECTURES["llama"].config())
    with pytest.warns(UserWarning, match="no output head was found in LlamaModel.*exclude"):
        sites = ModelHooks(model)
    assert not sites.head
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelHooks(model, warn_if_no_head=False)


class Fails(Exception):
    pass


class Probe(nn.Module):
    """Notes how deep in excluded modules it is run, and fails where it is told to."""

    def __init__(self, scope: Scope, depths: list[int], *, fails: bool = False) -> None:
        super().__init__()
        self.scope = scope
        self.depths = depths
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.depths.append(self.scope.excluded)
        if self.fails:
            raise Fails
        return x


def blocks(scope: Scope, depths: list[int], *, fails: bool = False) -> nn.Module:
    inner = Named("probe", probe=Probe(scope, depths, fails=fails))
    outer = Named(
        "before",
        "inner",
        "after",
        inner=inner,
        before=Probe(scope, depths),
        after=Probe(scope, depths),
    )
    return Named("outer", "head", outer=outer, head=Probe(scope, depths))


def test_excluded_modules_nest() -> None:
    scope = Scope()
    depths = []
    model = blocks(scope, depths)
    ModelHooks(model, exclude=["outer"])
    kept = ModelHooks(model, exclude=["outer.inner", r"out.*\.probe"])
    with entered(scope):
        model(torch.ones(1))
    assert depths == [0, 2, 0, 0]  # the first was dropped at once
    both = ModelHooks(model, exclude=["outer"])
    depths.clear()
    with entered(scope):
        model(torch.ones(1))
    assert depths == [1, 3, 1, 0]
    assert scope.excluded == 0
    both.close()
    kept.close()


def test_an_exception_leaves_excluded_modules() -> None:
    scope = Scope()
    depths = []
    model = blocks(scope, depths, fails=True)
    sites = ModelHooks(model, exclude=["outer", "inner", "probe"])
    with entered(scope), pytest.raises(Fails):
        model(torch.ones(1))
    assert depths == [1, 3] and scope.excluded == 0
    sites.close()


class Survives(Named):
    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(Fails):
            self.inner(x)
        return self.after(x)


def test_where_a_hook_of_others_raises_the_excluded_module_around_is_still_one() -> None:
    def fail(*_: Any) -> None:
        raise Fails

    scope = Scope()
    depths = []
    inner = Probe(scope, depths)
    model = Named("outer", outer=Survives(inner=inner, after=Probe(scope, depths)))
    inner.register_forward_pre_hook(fail)
    sites = ModelHooks(model, exclude=["outer", "inner"], warn_if_no_head=False)
    with entered(scope):
        model(torch.ones(1))
    assert depths == [1] and scope.excluded == 0
    sites.close()


class LigerNorm(Probe):
    pass


class LigerBlock(Named):
    pass


def test_kernels_that_keep_what_they_save_are_excluded_and_blocks_around_them_are_not() -> None:
    scope = Scope()
    depths = []
    block = LigerBlock("norm", "probe", norm=LigerNorm(scope, depths), probe=Probe(scope, depths))
    named = Probe(scope, depths)
    model = Named(
        "block",
        "my_Liger_loss",
        "head",
        block=block,
        my_Liger_loss=named,
        head=Probe(scope, depths),
    )
    sites = ModelHooks(model)
    with entered(scope):
        model(torch.ones(1))
    assert depths == [1, 0, 1, 0]
    sites.close()


@pytest.mark.parametrize("make", [whole, adapted])
def test_names_are_those_of_the_model_before_it_was_wrapped(make: Callable[[], nn.Module]) -> None:
    model = Replicated(make())
    sites = ModelHooks(model, exclude=["layers.3.mlp", r"model\.layers\.[01]\.self_attn"])
    excluded = [name for name, hooks in hooks_on(model).items() if "_exclude" in hooks]
    ends = ["layers.0.self_attn", "layers.1.self_attn", "layers.3.mlp"]
    assert [name[name.index("layers.") :] for name in excluded] == ends
    sites.close()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("self_atn", "no module matches 'self_atn'(.|\n)*close names are: self_attn"),
        ("elf_attn", "no module matches 'elf_attn'"),  # the end of a word is not the end of a name
        ("mlp(", "ends no module's name, and is no regular expression"),
    ],
)
def test_a_pattern_without_a_match_is_refused_and_leaves_no_hook(
    pattern: str, message: str
) -> None:
    model = whole()
    with pytest.raises(ConfigError, match=message):
        ModelHooks(model, exclude=["mlp", pattern])
    assert hooks_on(model) == {}


def test_hooks_are_put_on_once_and_go_with_the_last_context() -> None:
    model = adapted()
    first = ModelHooks(model, exclude=["mlp"])
    once = hooks_on(model)
    with_weights = {name for name, hooks in once.items() if "_enter_weights" in hooks}
    assert with_weights == {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    second = ModelHooks(model, exclude=["mlp", "self_attn"])
    both = hooks_on(model)
    assert all(len(hooks) == len(set(hooks)) for hooks in both.values()), "a hook is there twice"
    more = {name for name in both if both[name] != once.get(name)}
    assert len(more) == 12 and all(name.endswith("self_attn") for name in more)
    first.close()
    first.close()
    assert hooks_on(model) == both  # the second has all of the first's
    third = ModelHooks(Replicated(model), warn_if_no_head=False)
    second.close()
    assert hooks_on(model) == {
        name: left
        for name in once
        if (left := [hook for hook in once[name] if hook not in ("_exclude", "_include")])
    }
    third.close()
    assert hooks_on(model) == {}


def test_a_forgotten_context_takes_its_hooks_along_and_none_keeps_the_model() -> None:
    model = whole()
    sites = ModelHooks(model)
    del sites
    gc.collect()
    assert hooks_on(model) == {}
    sites = ModelHooks(model, exclude=["mlp"])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    sites.close()


def test_outside_of_a_context_and_in_evaluation_nothing_is_noted() -> None:
    model = whole()
    scope = Scope()
    sites = ModelHooks(model, exclude=["mlp"])
    with entered(scope):
        pass
    model.eval()
    with torch.no_grad():
        model(**micro_batches(1)[0])
    assert scope == Scope() and current() is None
    sites.close()


def test_a_model_with_hooks_is_copied_pickled_and_saved(tmp_path: Path) -> None:
    model = whole()
    sites = ModelHooks(model, exclude=["mlp"])
    (batch,) = micro_batches(1)
    expected = model(**batch).loss
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.save_pretrained(tmp_path)
    copies.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    for one in copies:
        with entered(Scope()):
            assert torch.equal(one(**batch).loss, expected)
        other = ModelHooks(one, exclude=["mlp"])
        assert hooks_on(one) == hooks_on(model)  # those that came with the copy are not there twice
        other.close()
        assert hooks_on(one) == {}
    sites.close()


def modules_in(model: nn.Module, batch: dict[str, Tensor], scope: Scope) -> Iterator[nn.Module]:
    """Run `model`; yield the innermost module with weights at each tensor that autograd saves."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(scope.modules[-1][0] if scope.modules else None)
        return tensor

    with entered(scope), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch).loss.backward()
    return iter(found)


@pytest.mark.parametrize("make", [whole, adapted])
def test_modules_with_weights_are_known_while_they_run(make: Callable[[], nn.Module]) -> None:
    model, (batch,) = make(), micro_batches(1)
    sites = ModelHooks(model)
    scope = Scope()
    running = set(modules_in(model, batch, scope)) - {None}
    assert scope.modules == []
    linears = {
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".0." not in name
    }
    # in the first layer nothing below an adapter is trained
    assert len(linears) > 70 and linears <= running
    assert all(list(module.parameters(recurse=False)) for module in running)
    sites.close()


def test_modules_with_weights_are_left_by_an_exception() -> None:
    layer = nn.Linear(4, 4)
    model = Named("layer", "head", layer=layer, head=linear())
    sites = ModelHooks(model)
    scope = Scope()
    with entered(scope), torch.autocast("cpu"), pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert scope.modules == []
    sites.close()


def test_hooks_of_one_owner_outlive_none_of_another() -> None:
    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        counted.append(module)

    counted: list[nn.Module] = []
    module = linear()
    hooks = Hooks(count)
    one = Hooked()
    other = Hooked()
    for owner in (one, one, other):
        owner.add(module, hooks)
    module(torch.ones(1, 4))
    assert counted == [module]
    one.close()
    module(torch.ones(1, 4))
    assert len(counted) == 2
    other.close()
    module(torch.ones(1, 4))
    assert len(counted) == 2 and not module._forward_pre_hooks_with_kwargs
