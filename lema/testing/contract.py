"""Every promise of a device backend, as one class of tests.

One of them takes a training step twice, on the same device: streamed, and of the whole model with
`transformers` and PEFT alone.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lema.backend import Backend
from lema.config import LemaConfig
from lema.convert.prepare import prepare
from lema.engine.head.loss import trained_tokens
from lema.lora.attach import lora_config
from lema.stream.placement import PAGE
from lema.testing.copies import SLOT, CopyPromises, read, source_of
from lema.train import LemaModel

__all__ = ["BackendContract"]

RANK = 4
ALPHA = 8


class BackendContract(CopyPromises):
    """Every promise of `lema.backend.Backend`, one test each.

    Attributes:
        tolerance: largest difference allowed between a streamed training step and the same step of
            the whole model on the same device, relative to the largest number of the tensor
            compared; 0 asks for equal bits.
        half_dtypes: half-precision dtypes of weights that the backend computes with.
        busy_matmuls: how much work is queued ahead of a read, so that a device with a queue falls
            behind its host. Override `keep_busy` too where the device is so fast that products are
            not enough.
    """

    tolerance: ClassVar[float] = 0.0
    half_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    busy_matmuls: ClassVar[int] = 4

    def model_config(self) -> PreTrainedConfig:
        """Return the config of a small causal language model, of at least four layers and 64
        positions.
        """
        raise NotImplementedError("say which model to train one step of")

    def test_it_is_a_backend(self) -> None:
        """It has every member of the protocol, a name, and a device that tensors live on."""
        with closing(self.backend()) as backend:
            assert isinstance(backend, Backend), (
                f"{backend!r} lacks members of lema.backend.protocols.Backend"
            )
            assert isinstance(backend.name, str) and backend.name, "a backend has a name"
            assert isinstance(backend.device, torch.device)
            assert torch.ones(2, device=backend.device).device.type == backend.device.type

    def test_it_opens_again_after_it_was_closed(self) -> None:
        """`close` gives back what the constructor took."""
        for _ in range(2):
            with closing(self.backend()) as backend:
                backend.end_step()
                backend.synchronize()

    def test_a_generator_state_brings_dropout_back(self) -> None:
        """`rng_state` is a copy; `set_rng_state` makes the device draw the same again."""
        with closing(self.backend()) as backend:
            ones = torch.ones(4096, device=backend.device)
            state = backend.rng_state()
            first, second = (nn.functional.dropout(ones, 0.5).cpu() for _ in range(2))
            assert not torch.equal(first, second), "dropout draws the same without being told to"
            after = backend.rng_state()
            backend.set_rng_state(state)
            assert torch.equal(nn.functional.dropout(ones, 0.5).cpu(), first)
            assert torch.equal(nn.functional.dropout(ones, 0.5).cpu(), second)
            assert torch.equal(backend.rng_state(), after)
            assert not torch.equal(state, after), "a state changed after it was returned"

    def test_autocast_computes_in_the_dtype_of_the_weights(self) -> None:
        """fp32 input times half-precision weight is half precision, with an fp32 gradient for
        the input.
        """
        with closing(self.backend()) as backend:
            for dtype in self.half_dtypes:
                weight = torch.randn(16, 8, device=backend.device).to(dtype)
                inputs = torch.randn(4, 8, device=backend.device, requires_grad=True)
                with backend.autocast(dtype):
                    product = nn.functional.linear(inputs, weight)
                assert product.dtype == dtype
                product.float().sum().backward()
                assert inputs.grad is not None and inputs.grad.dtype == torch.float32
                assert (inputs @ weight.float().T).dtype == torch.float32, (
                    "autocast did not end with its block"
                )

    def test_autocast_to_float32_changes_nothing(self) -> None:
        """Full-precision weights compute as they are."""
        with closing(self.backend()) as backend:
            weight, inputs = (torch.randn(16, 16, device=backend.device) for _ in range(2))
            plain = inputs @ weight
            with backend.autocast(torch.float32):
                product = inputs @ weight
            assert product.dtype == torch.float32 and torch.equal(product.cpu(), plain.cpu())

    def test_memory_is_reported_in_bytes(self) -> None:
        """What is used is at most the peak, and fits the device; the peak never sinks."""
        with closing(self.backend()) as backend:
            before = backend.memory()
            block = torch.ones(4 << 20, dtype=torch.uint8, device=backend.device)
            backend.synchronize()
            during = backend.memory()
            assert int(block[-1]) == 1
            for memory in (before, during):
                assert 0 <= memory.used <= memory.peak, f"used {memory.used}, peak {memory.peak}"
                assert memory.total > 0 and memory.used <= memory.total, (
                    f"used {memory.used} of {memory.total}"
                )
            assert during.peak >= before.peak

    def test_the_group_gathers_in_rank_order_and_leaves_whole_gradients(self) -> None:
        """`gather` returns one tensor per rank; a parameter without a gradient stays without."""
        with closing(self.backend()) as backend:
            parallel = backend.parallel
            device = backend.device
            assert 0 <= parallel.rank < parallel.size
            gathered = parallel.gather(torch.full((3,), float(parallel.rank), device=device))
            assert [tensor.tolist() for tensor in gathered] == [
                [float(rank)] * 3 for rank in range(parallel.size)
            ]
            replicated, unused = (nn.Parameter(torch.zeros(2, device=device)) for _ in range(2))
            replicated.grad = torch.tensor([3.0, 4.0], device=device)
            parallel.reduce_gradients([replicated, unused])
            assert replicated.grad.tolist() == [3.0, 4.0], (
                "what every rank has the whole gradient of is not summed"
            )
            assert unused.grad is None
            assert float(parallel.norm([replicated, unused])) == 5.0, (
                "what all ranks have alike counts once"
            )

    def test_a_group_of_one_leaves_a_layer_whole(self) -> None:
        """There is no other process to share with."""
        with closing(self.backend()) as backend:
            layer = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
            before = {name: value.clone() for name, value in layer.state_dict().items()}
            if backend.parallel.size == 1:
                backend.parallel.shard(layer)
                after = layer.state_dict()
                assert after.keys() == before.keys()
                assert all(torch.equal(after[name], before[name]) for name in before)

    def test_a_process_alone_is_all_its_replicas(self) -> None:
        """Sums and exchanges leave what is there; shared memory is zeroed, and begins at a page."""
        with closing(self.backend()) as backend:
            replicas = backend.replicas
            assert (
                0 <= replicas.rank < replicas.size
                and 0 <= replicas.local_rank < replicas.local_size
            )
            if replicas.size == 1:
                tensor = torch.arange(8.0, device=backend.device)
                replicas.sum(tensor)
                assert tensor.tolist() == list(range(8)), "the sum over one process is what it has"
                assert replicas.exchange({"loss": 1.5}) == [{"loss": 1.5}]
                for size in (0, 1, PAGE + 3):
                    memory = replicas.shared_memory(size)
                    assert memory.dtype == torch.uint8 and tuple(memory.shape) == (size,)
                    assert not memory.any(), "shared memory is zeroed"
                    assert not size or memory.data_ptr() % PAGE == 0, (
                        "shared memory begins at a page"
                    )
                    backend.host_buffer(size, memory)

    def test_a_process_alone_gathers_its_own_part(self) -> None:
        """Compute after `wait` sees the whole; the part is released, and what was in its place
        was used until then.
        """
        with closing(self.backend()) as backend:
            if backend.replicas.size == 1:
                slots = backend.device_slots(SLOT, 1)
                gathered = torch.zeros(SLOT, dtype=torch.uint8, device=backend.device)
                reads = []
                for number in range(4):
                    source = source_of(backend, number)
                    gathering = backend.replicas.gather(slots.upload(source), gathered)
                    gathering.wait()
                    reads.append((self._late_read(backend, gathered), source))
                for number, (result, source) in enumerate(reads):
                    assert torch.equal(result.cpu(), source.float()), f"gathering {number}"
                upload = slots.upload(source_of(backend, 9))
                assert torch.equal(read(upload.wait()), source_of(backend, 9)), (
                    "the slot of the part is not free"
                )

    def test_a_training_step_is_that_of_the_whole_model(self, tmp_path: Path) -> None:
        """Loss, adapter gradients and AdamW's step, kept graph or recomputed, against PEFT on
        the same device.
        """
        published = publish(self.model_config(), tmp_path)
        for recompute, dropout, num_batches in ((True, 0.1, 1), (True, 0.0, 2), (False, 0.0, 2)):
            step = steps_of_both(self.backend(), published, recompute, dropout, num_batches)
            for what, actual, expected in step:
                self._compare(what, actual.cpu(), expected.cpu())

    def _compare(self, what: str, actual: Tensor, expected: Tensor) -> None:
        assert bool(expected.any()), f"{what} is zero, which proves nothing"
        if self.tolerance == 0:
            assert torch.equal(actual, expected), (
                f"{what} differs, by {float((actual - expected).abs().max()):.3g}"
            )
        else:
            difference = float((actual - expected).abs().max() / expected.abs().max())
            # pytest -rP
            sys.stdout.write(
                f"measured: {what} differs by {difference:.3e} of its largest number\n"
            )
            assert difference <= self.tolerance, (
                f"{what} differs by {difference:.3g} of its largest number"
            )


def publish(config: PreTrainedConfig, directory: Path) -> Path:
    """Write a random model of `config` in the hub's form and in the streamed form; return the
    first.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(directory / "published")
    prepare(model, directory / "streamed")
    return directory / "published"


def steps_of_both(
    backend: Backend, published: Path, recompute: bool, dropout: float, num_batches: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what is compared, its streamed value and that of the whole model: loss, gradients,
    adapters after AdamW. The step has `num_batches` micro-batches of the model that `publish`
    wrote; the backend is closed at the end."""
    sizes = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": dropout}
    streamed = str(published.with_name("streamed"))
    # Without a limit every layer streams; by default those stay that the device has memory for.
    options: dict[str, Any] = {"gradient_checkpointing": recompute, "device_memory": None}
    settings = LemaConfig(streamed, device=backend.name, **options, **sizes)
    with closing(LemaModel(settings, backend=backend)) as model:
        model.initialize_lora()
        assert model.lora_manager is not None
        model.lora_manager.train()
        whole_model = _whole_model(published, dropout, backend.device)
        streamed_adapter = _adapter(model.lora_manager)
        whole_adapter = _adapter(whole_model)
        assert streamed_adapter.keys() == whole_adapter.keys()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # because B is zero at first, which leaves A without a gradient
            for name, parameter in streamed_adapter.items():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
                whole_adapter[name].copy_(parameter)
        batches = _batches(whole_model.config.vocab_size, num_batches)
        state = backend.rng_state()
        expected = _whole_loss(whole_model, batches, backend.device)
        backend.set_rng_state(state)
        loss = model.adapter.loss(batches)
        torch.autograd.backward(loss)
        yield "the loss", loss.detach(), expected
        for name, parameter in streamed_adapter.items():
            expected_grad = whole_adapter[name].grad
            assert parameter.grad is not None and expected_grad is not None, (
                f"{name} has no gradient"
            )
            yield f"the gradient of {name}", parameter.grad, expected_grad
        for adapter in (streamed_adapter, whole_adapter):
            torch.optim.AdamW(list(adapter.values())).step()
        backend.end_step()
        backend.synchronize()
        for name, parameter in streamed_adapter.items():
            yield f"{name} after the step", parameter.detach(), whole_adapter[name].detach()


def _whole_model(published: Path, dropout: float, device: torch.device) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(published)
    assert isinstance(base, PreTrainedModel)
    model = get_peft_model(
        base, lora_config(base, rank=RANK, alpha=ALPHA, dropout=dropout, targets=None)
    )
    assert isinstance(model, PeftModel)
    return model.to(device).train()


def _adapter(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def _batches(vocabulary: int, count: int) -> list[dict[str, Tensor]]:
    """Draw micro-batches of different lengths, each with tokens that are not trained."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for index in range(count):
        tokens = torch.randint(1, vocabulary, (2, 12 + 5 * index), generator=generator)
        labels = tokens.clone()
        labels[0, :4] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def _whole_loss(
    model: PeftModel, batches: Sequence[Mapping[str, Tensor]], device: torch.device
) -> Tensor:
    """Run the whole model over the micro-batches, gradients accumulated; return the mean over
    all trained tokens.
    """
    options = {} if len(batches) == 1 else {"num_items_in_batch": trained_tokens(batches)}
    total = torch.zeros((), device=device)
    for batch in batches:
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}, **options).loss
        loss.backward()
        total = total + loss.detach()
    return total
