"""What clients of the Tinker API send as JSON, checked.

Fields that are not here are refused, as the API's own client refuses them.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from lema.train.learner.adapter import AdamSettings

__all__ = [
    "AdamParams",
    "CancelFuture",
    "CreateModel",
    "CreateSamplingSession",
    "CreateSession",
    "Finish",
    "LoadWeights",
    "OfModel",
    "OfSession",
    "OptimStep",
    "RetrieveFuture",
    "Sample",
    "SamplingParams",
    "SaveWeights",
    "SaveWeightsForSampler",
    "WeightsInfo",
]

Text = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Metadata = Annotated[dict[str, Any], Field(max_length=64)]
MOST_CHUNKS = 4096


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(_Asked):
    """A client begins."""

    tags: Annotated[list[Text], Field(max_length=64)]
    user_metadata: Metadata | None = None
    sdk_version: Text
    project_id: Text | None = None
    display_name: Text | None = None
    type: Literal["create_session"] = "create_session"


class OfSession(_Lenient):
    """Something about a session."""

    session_id: Text


class Finish(_Lenient):
    """A client ends."""


class LoraOptions(_Asked):
    """What an adapter is to be."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerOptions(_Lenient):
    """The kind of an optimizer."""

    type: Text = "adamw"


class CreateModel(_Asked):
    """A new adapter is asked for."""

    session_id: Text
    model_seq_id: Annotated[int, Field(ge=0, le=999_999)]
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraOptions | None = None
    optimizer_config: OptimizerOptions = OptimizerOptions()
    type: Literal["create_model"] = "create_model"


class OfModel(_Lenient):
    """Something about an adapter."""

    model_id: Text


class AdamParams(_Asked):
    """The parameters of one step."""

    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[Finite, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Finite, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(ge=0)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0

    def settings(self) -> AdamSettings:
        """Return them as a learner takes them."""
        return AdamSettings(**self.model_dump())


class OptimStep(_Asked):
    """An optimizer step is asked for."""

    adam_params: AdamParams = Field(validation_alias=AliasChoices("adam_params", "optim_params"))
    model_id: Text
    seq_id: Count
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(_Asked):
    """A checkpoint for further training is asked for."""

    model_id: Text
    path: Text | None = None
    seq_id: Count
    ttl_seconds: Count | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSampler(_Asked):
    """A checkpoint for sampling is asked for."""

    model_id: Text
    path: Text | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: Count
    ttl_seconds: Count | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(_Asked):
    """A checkpoint is to be taken: by an adapter, or by a new one of a session."""

    model_id: Text | None = None
    seq_id: Count | None = None
    session_id: Text | None = None
    model_seq_id: Annotated[int, Field(ge=0, le=999_999)] | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    path: Text
    optimizer: bool
    optimizer_config: OptimizerOptions | None = None
    weights_access_token: Text | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSamplingSession(_Asked):
    """A client begins to sample."""

    session_id: Text
    sampling_session_seq_id: Count
    base_model: Text | None = None
    model_path: Text | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class TextChunk(_Asked):
    """Tokens of a prompt."""

    tokens: Annotated[list[Count], Field(max_length=2**20)]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(_Asked):
    """A prompt."""

    chunks: Annotated[list[TextChunk], Field(max_length=MOST_CHUNKS)]

    def tokens(self) -> list[int]:
        """Return its tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(_Lenient):
    """How texts are sampled."""

    max_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    seed: int | None = None
    stop: (
        Text
        | Annotated[list[Text], Field(max_length=64)]
        | Annotated[list[Count], Field(max_length=64)]
        | None
    ) = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class Sample(_Lenient):
    """Texts are asked for."""

    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Text | None = None
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    prompt_alt_tokens_k: Count = 0
    target_prompt_logprobs: Any = None
    prompt_logprobs_last_n: int | None = None


class RetrieveFuture(_Asked):
    """An answer is asked for."""

    request_id: Text
    allow_metadata_only: bool = False


class CancelFuture(_Lenient):
    """An answer is not wanted any more."""

    request_id: Text


class WeightsInfo(_Lenient):
    """Something about a checkpoint."""

    tinker_path: Text
