"""The keys of the parameter JSON: names, types, defaults and meanings.

Names are those of Transformers' configs and `TrainingArguments` wherever one exists.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SerializeAsAny

from terakoya.components import Architecture, Objective, Optimizer, Schedule, Tracker
from terakoya.config.data import Data
from terakoya.config.lora import LoraSettings
from terakoya.config.loss_scaling import LossScaling
from terakoya.config.parallel import Parallel
from terakoya.config.settings import Settings
from terakoya.config.spikes import Spikes
from terakoya.config.start_from import StartFrom

LENGTH_KEYS = ("max_steps", "max_tokens", "epochs")
"""The keys of which exactly one sets the length of a run."""


class Checkpoint(Settings):
    """When to save and what to keep. The last step is always saved.

    Attributes:
        save_steps: optimizer steps between checkpoints.
        keep: number of checkpoints to keep.
        model: which checkpoints also hold the model as a Transformers folder: every one, the last of the run or none;
            with null the engine decides.
        async_save: whether training continues while a checkpoint is written, from a copy of the state in host memory.
    """

    save_steps: PositiveInt = 1000
    keep: Annotated[int, Field(ge=2)] = 3
    model: Literal["every", "last", "never"] | None = None
    async_save: bool = False


class Evaluation(Settings):
    """Validation every `steps` optimizer steps over at most `batches` global batches of each validation store."""

    steps: PositiveInt
    batches: PositiveInt = 50


class ParameterFields(Settings):
    """The keys of the parameter JSON, with their types and defaults; `Parameters` adds the checks.

    Attributes:
        batch_size: rows of one optimizer step on each node, by node rank or host name; "-1" is the only node.
        on_lost_node: what happens to a run that starts or restarts with fewer nodes than `batch_size` has: it stops, or
            the remaining nodes share the same global batch.
        micro_batch_size: rows that one process computes at once; null is its whole share of the batch.
        max_steps, max_tokens, epochs: the run's length; exactly one is given. The run ends with the step that reaches
            `max_tokens`, or whose rows complete the `epochs`; with one store, an epoch has each row once.
        max_grad_norm: the bound on the gradient's norm; 0 is none.
        precision: the precision of matrix products; weights, their gradients and the optimizer state stay fp32. With
            fp8 the products of linear layers are fp8 and the rest bf16.
        loss_scaling: how fp16 scales its losses; null is torch's default.
        max_consecutive_skipped_steps: how many steps in a row may be skipped because their loss or gradients are not
            finite; one more ends the run. 0 ends it at the first. In fp16 `loss_scaling` decides instead.
        spikes: what counts as a spike of the loss or the gradient norm, and what happens then; null does not look.
        activation_checkpointing: which activations of a block are not stored but computed again in the backward: all
            ("full"), all but the results of expensive operations (matrix products, attention; "selective"), or none
            (null). Changes only memory and time.
        max_minutes: save and stop after this time; null is never.
        start_from: the model folder with the weights of step 0; null initialises them randomly. A resumed run does not
            read it.
        lora: adapters that are trained instead of the weights, which stay those of `start_from`; null is none.
        frozen_layers: the number of lowest layers whose weights stay as they are, together with the embeddings; -1 is
            none, 0 the embeddings alone.
    """

    data: Data
    architecture: SerializeAsAny[Architecture]
    objective: SerializeAsAny[Objective]
    optimizer: SerializeAsAny[Optimizer]
    schedule: SerializeAsAny[Schedule]
    batch_size: dict[str, int]
    on_lost_node: Literal["stop", "redistribute"] = "stop"
    micro_batch_size: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    max_grad_norm: NonNegativeFloat = 1.0
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    loss_scaling: LossScaling | None = None
    max_consecutive_skipped_steps: NonNegativeInt = 5
    spikes: Spikes | None = Spikes()
    activation_checkpointing: Literal["full", "selective"] | None = None
    parallel: Parallel = Parallel()
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation | None = None
    logging_steps: PositiveInt = 10
    trackers: Annotated[tuple[SerializeAsAny[Tracker], ...], Field(strict=False)] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 42
    max_minutes: PositiveFloat | None = None
    start_from: StartFrom | None = None
    lora: LoraSettings | None = None
    frozen_layers: Annotated[int, Field(ge=-1)] = -1
