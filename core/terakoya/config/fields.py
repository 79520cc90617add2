"""The keys of the parameter JSON: names, types, defaults and meanings.

Names are those of Transformers' configs and `TrainingArguments` wherever one exists.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from terakoya.components import Architecture, EventPlugin, Objective, Optimizer, Schedule, Tracker
from terakoya.config.data import Data
from terakoya.config.lora import LoraSettings
from terakoya.config.loss_scaling import LossScaling
from terakoya.config.mup import Mup
from terakoya.config.parallel import Parallel
from terakoya.config.phases import Phase
from terakoya.config.settings import Settings
from terakoya.config.spikes import Spikes
from terakoya.config.start_from import StartFrom

LENGTH_KEYS = ("max_steps", "max_tokens", "epochs")
"""The keys of which exactly one sets the length of a run."""


class Checkpoint(Settings):
    """When to save and what to keep. The last step is always saved."""

    save_steps: PositiveInt = 1000
    """Steps from one checkpoint to the next. Unit: optimizer steps."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Number of newest checkpoints to keep; older ones are removed."""
    model: Literal["every", "last", "never"] | None = None
    """Which checkpoints also hold the model as a Transformers folder: every one, the last one of the run, or none. With
    null the engine decides."""
    async_save: bool = False
    """Whether training continues while a checkpoint is written, from a copy of the state in host memory."""


class Evaluation(Settings):
    """Validation every `steps` optimizer steps over at most `batches` global batches of each validation store."""

    steps: Annotated[PositiveInt, Field(examples=[1000])]
    """Steps from one validation to the next. Unit: optimizer steps."""
    batches: PositiveInt = 50
    """The most global batches that are read from each validation store: rows from all of it. Unit: global batches."""


class Profile(Settings):
    """Which steps are traced, operation by operation, and timed, phase by phase. A traced step is slower."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False, examples=[[100, 105]])] = (100, 105)
    """The first and the last traced step, counted from 1. RUN/profile gets traces for https://ui.perfetto.dev, of rank
    0 and of the slowest rank; the log and the report get the time of each phase. Unit: optimizer steps."""

    @model_validator(mode="after")
    def _are_in_order(self) -> Self:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"steps: expected the first and the last step, got {list(self.steps)}")
        return self


class ParameterFields(Settings):
    """The keys of the parameter JSON, with their types and defaults; `Parameters` adds the checks."""

    data: Data
    """The token stores of the run, their shares of the rows, and the order of the rows."""
    architecture: SerializeAsAny[Architecture]
    """The model family, by its `type`, and the sizes of the model."""
    objective: SerializeAsAny[Objective]
    """What the model learns, by its `type`: how rows are made and masked, and which losses there are."""
    optimizer: SerializeAsAny[Optimizer]
    """The optimizer, by its `type`, with its learning rate."""
    mup: Mup | None = None
    """Maximal update parametrisation: the best learning rate of a narrow model is about the best of a wide one. null is
    the usual initial values, and one learning rate for all weights."""
    schedule: SerializeAsAny[Schedule]
    """How the learning rate changes over the run, by its `type`."""
    batch_size: Annotated[dict[str, int], Field(examples=[{"-1": 256}, {"*": 256}, {"0": 100, "1": 56}])]
    """Rows of one optimizer step on each node: an object from node rank or host name to rows, such as {"0": 100, "1":
    56}. "-1" is the only node: {"-1": 256}; `{"*": 256}` is each of
    equal nodes, whose number is --nodes. Unit: rows."""
    on_lost_node: Literal["stop", "redistribute"] = "stop"
    """What happens to a run that starts or restarts with fewer nodes than `batch_size` has: it stops, or the remaining
    nodes share the same global batch."""
    micro_batch_size: Annotated[PositiveInt | None, Field(examples=[32])] = None
    """Rows that one process computes at once; null is its whole share of the batch. Unit: rows."""
    max_steps: Annotated[PositiveInt | None, Field(examples=[100_000])] = None
    """The length of the run in steps; exactly one of `max_steps`, `max_tokens` and `epochs` is given. Unit: optimizer
    steps."""
    max_tokens: Annotated[PositiveInt | None, Field(examples=[10_000_000_000])] = None
    """The length of the run in tokens: it ends with the step that reaches this number. Unit: tokens."""
    epochs: Annotated[PositiveFloat | None, Field(examples=[1, 0.5])] = None
    """The length of the run in passes, or fractions of one, over the training data: it ends with the step whose rows
    complete them. With one store, an epoch has each row once. Unit: epochs."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """Parts of the run that follow each other, each with a length and the keys that it changes, such as
    `{"share": 0.2, "data": {"sequence_length": 1024}}`."""
    max_grad_norm: NonNegativeFloat = 1.0
    """The bound on the norm of the gradient, which is scaled down to it; 0 is no bound."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """The precision of matrix products; weights, their gradients and the optimizer state stay fp32. With fp8 the
    products of linear layers are fp8 and the rest bf16. "auto" is bf16 on GPUs and CPUs that have instructions for it,
    otherwise fp16 on a GPU and fp32 on a CPU; a run that goes on keeps what it has begun with."""
    autocast: bool = False
    """Whether a run in bf16 converts weights and activations where an operation takes bf16, as torch's autocast does,
    and keeps hidden states in float32 between layers. Without it they are bf16 from the embeddings to the losses, norms
    compute in float32 inside, and weights are converted once an optimizer step: a third less memory traffic.
    Architectures without a bf16 stream, engines other than "ddp" and "fsdp" and parallelism inside a replica always use
    autocast, and so do the other 16-bit precisions."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """Whether encoder blocks of the bf16 stream take terakoya's own kernels on a GPU, each of which does in one pass
    over memory what takes torch several: dropout, residual sum and layer norm, and gradients of biases ("auto"). They
    need Triton, and are tried before the first step: where one does not compile, or returns something else than torch,
    a warning says why, and the run takes torch's kernels on all ranks. "off" always takes torch's."""
    tf32: bool = False
    """Whether float32 matrix products on a GPU read 10 bits of their operands' fractions (TF32) instead of 23: several
    times faster, and less exact. It matters in fp32; on a CPU it changes nothing."""
    deterministic: bool = True
    """Whether a GPU takes only those of torch's algorithms that return the same bits each time, so that a resumed run
    goes on as if it had not been stopped; without it, sums of attention's gradients are rounded in another order each
    time. On a CPU it changes nothing."""
    loss_scaling: LossScaling | None = None
    """How fp16 scales its losses; null is torch's default."""
    max_consecutive_skipped_steps: NonNegativeInt = 5
    """How many steps in a row may be skipped because their loss or gradients are not finite; one more ends the run. 0
    ends it at the first. In fp16 `loss_scaling` decides instead. Unit: optimizer steps."""
    spikes: Spikes | None = Spikes()
    """What counts as a spike of the loss or the gradient norm, and what happens then; null does not look."""
    activation_checkpointing: Literal["full", "selective"] | None = None
    """Which activations of a block are not stored but computed again in the backward pass: all ("full"), all but the
    results of expensive operations (matrix products, attention; "selective"), or none (null). It changes only memory
    and time."""
    activation_offloading: bool = False
    """Whether large activations wait for the backward in the memory of the host, not of the device; where blocks are
    computed again, their inputs. It changes only memory and time."""
    compile: Literal["auto", "blocks", "whole", "off"] = "auto"
    """What torch.compile turns into fused kernels before the first step: each block of the model ("blocks"), everything
    from ids to losses ("whole"), or nothing ("off"). "auto" is "whole" on a GPU where `cuda_graphs` are taken, "blocks"
    where model and engine support it, and "off" on a CPU."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Whether forward and backward on a GPU are recorded as CUDA graphs, each of which the host starts at once instead
    of kernel by kernel; `compile` is then "whole". "auto" does so where one process trains with engine "ddp" on rows of
    one width without `activation_checkpointing`, and where a try before the first step succeeds: else the run says why,
    and its blocks are compiled. true refuses to train without them."""
    parallel: Parallel = Parallel()
    """How the processes of the run work together."""
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """The implementation of attention: torch's scaled dot product ("sdpa"), FlashAttention ("flash"), or plain matrix
    products ("eager"). "auto" takes flash on a GPU where it can compute the run, unless rows of that length were
    measured to be faster with sdpa, and otherwise sdpa."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save, and which checkpoints to keep. The last step is always saved."""
    evaluation: Evaluation | None = None
    """How often and on how much data the model is validated; null validates `data.validation` before the first step and
    after the last."""
    logging_steps: PositiveInt = 10
    """Steps from one line of metrics to the next. Unit: optimizer steps."""
    profile: Profile | None = None
    """Which steps are traced and timed in detail; null is none."""
    trackers: Annotated[tuple[SerializeAsAny[Tracker], ...], Field(strict=False)] = ()
    """Where metrics go besides `metrics.jsonl`: a list of components, each by its `type`."""
    events: Annotated[dict[str, SerializeAsAny[EventPlugin] | None], Field(default_factory=dict)]
    """Event plugins with settings, each by its name: what happens next to training, such as
    `{"early_stopping": {"patience": 3}}`. null switches off one that every run has."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 42
    """The seed of initial weights, order of rows, masks and dropout."""
    max_minutes: Annotated[PositiveFloat | None, Field(examples=[60])] = None
    """After this time the run saves and stops, and the same command continues it; null is no limit. Unit: minutes."""
    start_from: Annotated[StartFrom | None, Field(examples=["work/model"])] = None
    """The model folder with the weights of step 0; null initialises them randomly. A resumed run does not read it."""
    lora: LoraSettings | None = None
    """Adapters that are trained instead of the weights, which stay those of `start_from`; null is none."""
    frozen_layers: Annotated[int, Field(ge=-1)] = -1
    """The number of lowest layers whose weights stay as they are, together with the embeddings; -1 is none, 0 the
    embeddings alone. Unit: layers."""
