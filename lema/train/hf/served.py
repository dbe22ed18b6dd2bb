"""TRL's trainers for rewards with completions that a vLLM server makes, from the adapter alone.

    class MyTrainer(ServedMixin, GRPOTrainer): ...

    MyTrainer(model, reward_funcs=reward, args=arguments, train_dataset=prompts,
    server="http://localhost:8000").train()

TRL's own `use_vllm` merges the adapter and sends every weight of the model. Here the learner
streams, the server has the base, quantised or on another device, and the adapter goes from one to
the other as a directory. Each policy has a name of its own, because a server keeps what it has
computed of prompts by the adapter's name.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig
from torch import Tensor

from lema.convert.serving.layouts import split_files, stacked_files
from lema.errors import ConfigError, LemaError
from lema.lora.merge import ADAPTER
from lema.lora.serving.checks import check_served, published_names, stacks
from lema.lora.serving.servers import SERVERS
from lema.storage.atomic import appearing
from lema.train.hf.peftmodel import StreamedPeftModel
from lema.train.hf.reference import TRAINER, ReferenceMixin
from lema.train.hf.serverchoices import ServerChoices
from lema.train.hf.vllmserver import Completion, VLLMServer

if TYPE_CHECKING:

    class Below(ReferenceMixin):
        """TRL's trainer, which may not be installed."""

        args: Any
        eos_token_ids: Any
        max_completion_length: Any
        min_p: Any
        repetition_penalty: Any
        state: Any
        temperature: Any
        top_k: Any
        top_p: Any
        use_vllm: bool
        vllm_importance_sampling_clip_max: float | None
        vllm_importance_sampling_clip_min: float | None
        vllm_importance_sampling_correction: bool
        vllm_importance_sampling_mode: str
        _metrics: Any

        def _generate(self, prompts: list[Any]) -> object: ...
else:
    Below = ReferenceMixin

__all__ = ["ServedMixin"]

MOST_REQUESTS = 256  # at once
MOST_FAILURES = 5  # of a server that answers when it is asked whether it is there
RATIO = "importance_sampling_ratio"  # TRL's name for it, in what a loss is computed of


class ServedMixin(Below):
    """Has a vLLM server make the completions of TRL's `GRPOTrainer`, with the newest adapter.

    Put it before the trainer in the bases of a class. TRL's settings of vLLM apply where they say
    how completions count: `vllm_importance_sampling_correction`, `vllm_importance_sampling_mode`
    and its two clips. The ratio of the learner's probabilities to the server's is taken in the
    pass that the learner makes in any case, and so are the reference's log-probabilities if `beta`
    is not 0, where TRL makes one more pass for each.

    Args:
        args: arguments of the trainer by position.
        server: the URL of the server.
        server_timeout: seconds to wait for a server that does not answer.
        replay_choices: of a mixture of experts, have the learner's routers choose for a token the
            experts that the server chose, if it tells them.
        kwargs: arguments of the trainer by name.

    Raises:
        ConfigError: the model does not stream, the server takes no such adapter, the trainer is no
            `GRPOTrainer`, or `use_vllm` is set.
    """

    def __init__(
        self,
        *args: object,
        server: str,
        server_timeout: float = 240.0,
        replay_choices: bool = True,
        **kwargs: object,
    ) -> None:
        if not any(base.__name__ == TRAINER for base in type(self).__mro__):
            what = f"the trainer is no {TRAINER} of TRL, whose completions a server makes"
            how = f"put ServedMixin before a {TRAINER}, or leave it out"
            raise ConfigError(what, where=type(self).__name__, how=how)
        super().__init__(*args, **kwargs)
        if self.args.use_vllm:
            what = "use_vllm sends merged weights to the server"
            raise ConfigError(what, where="use_vllm", how="leave it out: the server is given")
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, StreamedPeftModel):
            what = f"the model is a {type(model).__name__}, and its layers do not stream"
            raise ConfigError(what, where="model", how="give the result of lema.streamed")
        note = lambda line: sys.stderr.write(f"{line}\n")  # noqa: E731 - one line
        self._policies = _Policies(
            model, VLLMServer(server, server_timeout, note), Path(self.args.output_dir)
        )
        self._choices = ServerChoices(model, note) if replay_choices else None
        self._sampled: dict[str, Any] | None = None  # what a loss is being computed of
        self._generated_at = -1  # the step at which completions were made last
        self._rounds = 0  # how often they were made before in that step

    def _generate(self, prompts: list[Any]) -> object:
        if self._choices is not None:
            self._choices.begin(is_training=self.model.training)
        return super()._generate(prompts)

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: object,
        multimodal_fields: object,  # noqa: ARG002 - of images
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        from accelerate.utils import broadcast_object_list, gather_object

        if images is not None or has_tool_images:
            what = "prompts have images, and the server is sent tokens alone"
            raise ConfigError(what, where="train_dataset", how="use prompts of text")
        everyone: list[list[int]] = gather_object(prompt_ids)
        completions: list[Any] = [None]
        if self.accelerator.is_main_process:
            step: int = self.state.global_step
            self._rounds = self._rounds + 1 if step == self._generated_at else 0
            self._generated_at = step
            seeds = random.Random(f"{self.args.seed} {step} {self._rounds}")
            prompts = everyone[::num_generations]
            completions = [
                self._policies.complete(
                    [(prompt, seeds.randrange(2**31)) for prompt in prompts],
                    num_generations,
                    self._sampling(),
                )
            ]
        broadcast_object_list(completions, from_process=0)
        begin = self.accelerator.process_index * len(prompt_ids)
        mine: list[Completion] = completions[0][begin : begin + len(prompt_ids)]
        if self._choices is not None:
            for prompt, row in zip(prompt_ids, mine, strict=True):
                self._choices.add([*prompt, *row.token_ids], row.choices)
        return [row.token_ids for row in mine], [row.logprobs for row in mine]

    def _sampling(self) -> dict[str, Any]:
        sampling = {
            "max_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": list(self.eos_token_ids),
        }
        return sampling | (self.args.generation_kwargs or {})

    def _compute_loss(
        self, model: object, inputs: dict[str, Any], *args: object, **kwargs: object
    ) -> object:
        corrects = self.vllm_importance_sampling_correction and "sampling_per_token_logps" in inputs
        self._sampled = inputs if corrects else None
        self.use_vllm = corrects  # so that TRL multiplies by the ratio
        try:
            return super()._compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.use_vllm = False
            self._sampled = None

    def _get_per_token_logps_and_entropies(
        self,
        model: object,
        input_ids: Tensor,
        attention_mask: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Any, ...]:
        trainer: Any = super()
        choices = None
        if self._choices is not None:
            choices = self._choices.of_rows(input_ids, attention_mask)
        with nullcontext() if choices is None else self._policies.model.replaying(choices):
            numbers: tuple[Any, ...] = trainer._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, *args, **kwargs
            )
        if self._sampled is not None:
            before = self._sampled.get("old_per_token_logps")
            learner = numbers[0].detach() if before is None else before
            self._sampled[RATIO] = self._ratio(learner, self._sampled)
            self._sampled = None
        return numbers

    def _ratio(self, learner: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the ratio of the learner's probabilities to the server's, by TRL's modes: of
        tokens, or of a whole completion; cut at the clips, or zero beyond them."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        sampled: Tensor = inputs["sampling_per_token_logps"]
        # A probability that the server did not tell needs no correction.
        difference = torch.nan_to_num((learner - sampled) * mask, nan=0.0)
        mode: str = self.vllm_importance_sampling_mode
        mean = difference.abs().sum() / mask.sum().clamp(min=1)
        training = "train" if self.model.training else "eval"
        self._metrics[training]["sampling/sampling_logp_difference/mean"].append(mean.item())
        self._metrics[training]["sampling/sampling_logp_difference/max"].append(
            difference.abs().max().item()
        )
        if mode.startswith("sequence"):
            difference = difference.sum(dim=-1, keepdim=True)
        ratio = difference.exp()
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if low is None and high is None:
            return ratio
        if mode.endswith("truncate"):
            return ratio.clamp(min=low, max=high)
        outside = (ratio < (-math.inf if low is None else low)) | (
            ratio > (math.inf if high is None else high)
        )
        return ratio.masked_fill(outside, 0.0)


class _Policies:
    """The adapters that a server is handed: each has a name by its numbers, and the server has the
    newest one.

    Args:
        model: of which they are.
        server: that reads them.
        output_dir: of the run, in which they are written.
    """

    def __init__(self, model: StreamedPeftModel, server: VLLMServer, output_dir: Path) -> None:
        skeleton = model.opened.skeleton
        config = cast(LoraConfig, model.peft_config[ADAPTER])
        self._names = published_names(skeleton)
        check_served("vllm", skeleton, config, self._names, where="server")
        self._is_stacked = stacks(SERVERS["vllm"], skeleton)
        self.model = model
        self._server = server
        self._directory = output_dir.absolute() / "served"
        run = hashlib.sha256(str(self._directory).encode()).hexdigest()[:8]
        self._prefix = f"lema-{run}-"

    def complete(
        self,
        prompts: Sequence[tuple[Sequence[int], int]],
        count: int,
        sampling: Mapping[str, Any],
    ) -> list[Completion]:
        """Have the server sample from the newest adapter.

        Args:
            prompts: token ids, and the seed of their completions.
            count: completions of each prompt.
            sampling: vLLM's sampling parameters.

        Returns:
            All completions of the first prompt, then those of the second, and so on.

        Raises:
            LemaError: the server does not come back.
            ConfigError: it refuses the adapter or a request.
            DiskError: the adapter could not be written.
        """
        name = self._write()
        for _ in range(MOST_FAILURES):
            try:
                self._hand_over(name)
                with ThreadPoolExecutor(min(len(prompts), MOST_REQUESTS)) as requests:
                    ask = lambda prompt: self._server.complete(  # noqa: E731 - one line
                        name, prompt[0], count, seed=prompt[1], **sampling
                    )
                    return [*chain.from_iterable(requests.map(ask, prompts))]
            except (OSError, HTTPException) as error:
                failure = error
                self._server.wait()
        what = f"the server broke off {MOST_FAILURES} times, though it answers: {failure}"
        raise LemaError(what, where=self._server.url, how="look at what the server has printed")

    def _write(self) -> str:
        """Write the adapter as it is now, if it is not there yet, and return its name."""
        files = (
            stacked_files(self.model, "vllm")
            if self._is_stacked
            else split_files(self.model, self._names)
        )
        digest = hashlib.sha256()
        for name in sorted(files.tensors):
            digest.update(name.encode())
            digest.update(files.tensors[name].cpu().contiguous().view(torch.uint8).numpy().data)
        policy = f"{self._prefix}{digest.hexdigest()[:16]}"
        directory = self._directory / policy
        if not directory.is_dir():
            with appearing(directory) as partial:
                files.write(partial)
        return policy

    def _hand_over(self, policy: str) -> None:
        """Have the server load an adapter if it does not have it, and forget those of before."""
        names = self._server.names()
        if policy in names:
            return
        self._server.load(policy, self._directory / policy, stacked=self._is_stacked)
        former = sorted(name for name in names if name.startswith(self._prefix))
        for name in former:
            self._server.unload(name)
        # A server may read files late, so those of the last one stay until the next.
        for directory in self._directory.iterdir():
            if directory.name not in (policy, *former[-1:]):
                shutil.rmtree(directory, ignore_errors=True)
