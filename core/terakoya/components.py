"""The base classes of everything a plugin may bring.

A component is a frozen pydantic model: its fields are the keys of the parameter JSON and hold settings only; what it
builds holds state. torch and transformers are imported inside methods, so that listing plugins stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveFloat

from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError
from terakoya.progress import Progress

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from terakoya.data.corpus import Corpus
    from terakoya.data.rows import Layout, Rows

WIDTHS = ("hidden_size", "num_attention_heads", "intermediate_size")
"""What `Architecture.scaled` scales, by Transformers' names."""

Head = Literal["masked", "pretraining", "causal", "discriminator", "seq2seq", "body"]


class Component(BaseModel):
    """Settings of one replaceable part. Subclasses add fields; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trial: ClassVar[Mapping[str, Any]] = {}
    """Settings to try this component with in seconds, as `terakoya plugins check` and the project's tests do: small
    sizes, and a value for whatever has no default. Usual names of sizes need no mention."""


# ------------------------------------------------------------------------------------------------------ tokenizer


@dataclass(frozen=True)
class Encoded:
    """Documents as token ids.

    Attributes:
        ids: every token of every line, (T,) in the vocabulary's dtype. No special tokens are added.
        line_lengths: tokens of each line, (L,) int32. Lines without a token are left out.
        document_lines: lines of each document, (D,) int32, zeros included.
        word_starts: (T,) bool, True where a word starts; None where the tokenizer does not know words.
        literals: how many special tokens stood literally in the text, by token, for example {"[MASK]": 2}.
    """

    ids: np.ndarray
    line_lengths: np.ndarray
    document_lines: np.ndarray
    word_starts: np.ndarray | None
    literals: Mapping[str, int] = field(default_factory=dict)


class Encoder(Protocol):
    """The fast path from text to ids; holds caches, belongs to one process."""

    vocabulary: Vocabulary

    def encode(self, documents: Sequence[str]) -> Encoded:
        """The ids of `documents`, each split at newlines; equal, line by line, to
        `tokenizer.load(folder)(line, add_special_tokens=False)`."""


class Tokenizer(Component):
    """A kind of tokenizer: trains one into a folder, loads it with Transformers, encodes with it at full speed."""

    special_tokens_in_text: Literal["parse", "split", "reject"] = "parse"
    """What a literal special token in the text becomes. `parse`: its id, as Transformers does. `split`: ordinary
    tokens, as if it were plain text. `reject`: the document is quarantined."""

    fallback: ClassVar[bool] = False
    """Whether this kind is asked for a folder only where no other kind reads it."""

    keeps_line_ends: ClassVar[bool] = False
    """Whether tokens may hold line ends. A store of documents is then encoded document by document, with
    `encoder.encode(documents, whole=True)`: each is one line, equal to `tokenizer.load(folder)(document)`."""

    def train(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        """Trains on `corpus` and saves into `folder` what `AutoTokenizer.from_pretrained` loads offline.

        `progress(done_bytes, total_bytes)` is called now and then. Returns facts for the record (words seen, ...).
        """
        raise NotImplementedError

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """The settings that read the tokenizer in `folder` with exactly its ids, or None if this kind cannot."""
        raise NotImplementedError

    def load(self, folder: Path) -> PreTrainedTokenizerBase:
        """The folder's tokenizer as Transformers loads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encoder(self, folder: Path) -> Encoder:
        """A new fast encoder for the tokenizer in `folder`."""
        raise NotImplementedError

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        """What ids depend on beside the settings, each hashed: vocabulary, dictionary, library versions."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------- model and objective


@dataclass(frozen=True)
class TensorPartition:
    """How several processes share the matrix products of each block (`parallel.tp_size`; Shoeybi et al., 2019,
    arXiv:1909.08053). All else every process computes for itself.

    Modules are named within a block of `Architecture.blocks`: `attention.output.dense`.

    Attributes:
        sizes: what is cut, by the JSON key that says it; each has to be a multiple of `tp_size`.
        entries: modules whose first argument is the last that all processes have whole: from there to a layer of `rows`
            each works on its own part.
        columns: linear layers of whose outputs each process computes a part -> how many matrices lie side by side in
            the layer's weight, each of which is cut by itself: 3 where it makes queries, keys and values.
        rows: linear layers of whose inputs each process has a part. Their outputs are added up; a bias comes once.
        on_parts: modules that every process has whole and applies to its own part alone, such as norms of heads.
        counts: module -> its attributes that count what is cut, and become that of the part.
    """

    sizes: Mapping[str, int]
    entries: Sequence[str]
    columns: Mapping[str, int]
    rows: Sequence[str]
    on_parts: Sequence[str] = ()
    counts: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Architecture(Component):
    """A model family. JSON keys are the names of its Transformers config."""

    heads: ClassVar[frozenset[Head]] = frozenset()
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "none"
    """How documents in one row are kept apart: through Transformers' AttentionInterface, by a 4D mask, or not at all
    (packed rows are then refused by name)."""

    def config(self, vocabulary: Vocabulary) -> PretrainedConfig:
        """The Transformers config of this architecture over `vocabulary`."""
        raise NotImplementedError

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """A freshly initialised model. Draws from torch's global generator, which the caller has seeded."""
        raise NotImplementedError

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H) of `batch`, documents kept apart."""
        raise NotImplementedError

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The vocabulary logits (..., V) of `hidden` (..., H)."""
        raise NotImplementedError

    def next_sentence_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The logits (B, 2) of "is the next sentence" / "is a random one", for the head `pretraining`."""
        raise UserError(
            f"architecture {type(self).__name__}: has no next-sentence head; set objective.next_sentence to false"
        )

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The logits (B, T), for the head `discriminator`, that the token behind each of `hidden` (B, T, H) is not the
        original one."""
        raise NotImplementedError

    def scaled(self, fraction: Fraction) -> Self:
        """This architecture with its width times `fraction`: hidden size, heads and feed-forward, not depth.

        Raises:
            UserError: a width times `fraction` is no whole number, or this architecture has other names for them.
        """
        name, changed = type(self).__name__, {}
        for key in WIDTHS:
            width = getattr(self, key, None)
            if not isinstance(width, int):
                raise UserError(f"architecture {name}: has no {key} to scale; describe the smaller model in full")
            if width * fraction != int(width * fraction):
                raise UserError(f"architecture {name}: {fraction} of {key} {width} is no whole number")
            changed[key] = int(width * fraction)
        return type(self).model_validate({**self.model_dump(), **changed})

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The repeated blocks, for compilation and activation checkpointing."""
        raise NotImplementedError

    def tensor_partition(self) -> TensorPartition | None:
        """How processes share each of the `blocks`; None where they cannot, and `parallel.tp_size` is refused."""
        return None

    def cut(self, model: PreTrainedModel, kept: range) -> None:
        """Takes out of `model` what a stage of a pipeline with its blocks `kept`, neighbours, does without: what stands
        before the first block where that is not among them, what stands behind the last where that is not.

        What is left runs by `hidden` as before, save that behind the first stage the batch holds `inputs_embeds`
        (B, T, H), the hidden states of the stage before, and that before the last the hidden states (B, T, H) that come
        out are those of the last block kept. Positions and masks are each stage's own business, from the same batch.

        To be written where the blocks of a model may lie on several processes (`parallel.pp_size`).
        """
        raise NotImplementedError

    def max_sequence_length(self) -> int | None:
        """The longest row the model can take, None if there is no bound."""
        return None

    def flops_per_token(
        self, model: PreTrainedModel, *, context: float, head_share: float = 1.0, causal: bool | None = None
    ) -> float:
        """Floating point operations that training `model`, with all its weights, must do for one real token.

        Counted from the weights that are multiplied and the config's layers, as `flops.per_token` describes; to be
        written where that is not what happens: experts, attention that is no plain one.

        Args:
            context: positions of its own document that a position sees on average, both sides counted.
            head_share: share of the positions at which the objective runs the head.
            causal: whether a position sees only what is before it; None asks the model's class.
        """
        from terakoya import flops

        try:
            blocks = self.blocks(model)
        except NotImplementedError:  # only compilation and activation checkpointing cannot do without
            blocks = ()
        return flops.per_token(model, blocks, context=context, head_share=head_share, causal=causal)


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the host.

    Attributes:
        arrays: name -> array, row-first: `input_ids`, `position_ids`, `document_ids` (B, T) int64, -1 in
            `document_ids` for padding, and whatever the objective adds.
        counts: name -> int: what each loss and metric is divided by, summed over all ranks and micro-batches.
            `tokens` (real positions) is always there.
    """

    arrays: Mapping[str, np.ndarray]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Term:
    """A number that training reports: the sum a module returns under this name, divided by a global count.

    `weight` None is a metric; a number makes it a loss that is added to the objective with that weight. With `bins` the
    module returns that many sums, (bins,), which are not reported themselves: `Objective.derived` reads them.
    """

    count: str
    weight: float | None = None
    bins: int | None = None


class Objective(Component):
    """What is learnt: how rows are cut, what is corrupted, which losses come out."""

    hidden_once: ClassVar[bool] = False
    """Whether what `build` makes holds one model, calls `Architecture.hidden` on it once, with the batch as it is, and
    of the rest needs the head alone: it can then be cut into the stages of a pipeline (`Architecture.cut`)."""

    def row_layout(self) -> Layout:
        """How rows are cut from a token store."""
        raise NotImplementedError

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Called once before a run: raises UserError where `vocabulary`, or rows of `sequence_length`, do not do."""

    def terms(self) -> Mapping[str, Term]:
        """Every name that `build(...)`'s forward returns, with its count and weight."""
        raise NotImplementedError

    def sums_by_position(self) -> bool:
        """Whether every term is a sum over positions, to which a position adds what follows from its own hidden state.
        Processes may then share the positions of a row (`parallel.sp_size`): of arrays (B, T) each has its slice, but
        all of `document_ids`, and of `masked_positions` and `masked_labels` (K,) those within its slice."""
        return False

    def derived(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        """Numbers to report beside the terms' means: what follows from sums over all ranks but is no sum over a count.

        `sums` holds the terms seen since the last report, float64, () or (bins,); `counts` what they are divided by.
        """
        return {}

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """The micro-batch of `rows`: a pure function of rows and their keys."""
        raise NotImplementedError

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """The one root module. Its forward takes a batch's tensors and returns name -> float32 sum, a scalar or
        (bins,)."""
        raise NotImplementedError

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        """The models to save, by sub-folder; "" is the folder itself."""
        raise NotImplementedError

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """Floating point operations of one real token, forward and backward, for the reported TFLOP/s.

        All that `exports(module)` names, each with its head at every position; to be written where heads see fewer, or
        where models are of other architectures. `context` as in `Architecture.flops_per_token`.
        """
        models = self.exports(module).values()
        return sum(architecture.flops_per_token(model, context=context) for model in models)

    def adopt(self, module: torch.nn.Module, models: Mapping[str, PreTrainedModel]) -> None:
        """Makes `module` one that exports `models`, which have the names and shapes of `exports(module)`: how a run
        starts from finished models. To be written where `exports` computes weights; may change `models`.

        Raises:
            UserError: `models` do not go together. Nothing has changed then.
        """
        from terakoya import adoption

        adoption.copy_weights(module, self.exports(module), models)


class Optimizer(Component):
    """An optimizer for the parameters of a module."""

    learning_rate: PositiveFloat = 1e-4
    """The peak, which the schedule's factor multiplies."""

    elementwise: ClassVar[bool] = True
    """Whether each weight's update looks at that weight's own numbers alone, so that ZeRO may cut parameters up."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """A torch optimizer over `module`'s trainable parameters, decay and no-decay in groups of their own."""
        raise NotImplementedError


class Schedule(Component):
    """The learning rate's course: a pure function of how far the run has come. `terakoya.schedules` holds what most of
    them share: warming up, falling to a floor, by steps or by tokens."""

    needs_validation: ClassVar[bool] = False
    """Whether it looks at validation losses: a run without `evaluation` is then refused."""

    def check(self, start: Progress) -> None:
        """Called once before a run, with its first step's progress: raises UserError where settings do not fit it."""

    def factor(self, progress: Progress) -> float:
        """What the peak learning rate is multiplied with in the optimizer step that `progress` stands before."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- around a run


class Exporter(Component):
    """A format that finished models are written in."""

    for_transformers: ClassVar[bool] = True
    """Whether Transformers loads what is written."""

    def export(self, models: Mapping[str, PreTrainedModel], tokenizer_folder: Path, out: Path) -> None:
        """Writes `models` (by sub-folder) with their tokenizer into the new folder `out`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ForeignParameters:
    """What another program's command line asks for, in the words of the parameter JSON.

    Attributes:
        parameters: the JSON, as far as it has a place for what was asked for.
        became: option -> the key, or keys, that it became.
        dropped: option -> why nothing is lost without it.
        unplaced: option -> what it asks for that has no place.
        notes: what else the reader should know, a sentence each.
    """

    parameters: Mapping[str, Any]
    became: Mapping[str, str]
    dropped: Mapping[str, str]
    unplaced: Mapping[str, str]
    notes: Sequence[str] = ()


class Importer(Component):
    """A foreign checkpoint format."""

    def read(self, source: Path, out: Path) -> None:
        """Reads the checkpoint at `source` and writes a Transformers folder to `out`."""
        raise NotImplementedError

    def parameters(self, file: Path) -> ForeignParameters:
        """The run that the script `file` of the same program starts; for formats whose programs are started so.

        Raises:
            UserError: the program has none, or the script starts no run.
        """
        raise UserError(f"importer {type(self).__name__}: reads checkpoints, no scripts")


class TrackerRun(Protocol):
    """An open tracker. Called from one background thread; may be slow, may raise: the loop never waits for it."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker(Component):
    """A place where numbers are shown."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the tracker for the run in `run_folder` (rank 0 only)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Job:
    """A training run that is to be started by a launcher.

    Attributes:
        name: what it is called where it runs: letters, digits and hyphens.
        arguments: those of `terakoya`: `train`, the parameter file, `--out`, the run's folder. Paths are absolute.
        folder: where the command starts, so that relative paths in the parameters mean what they mean here.
        run: the run's folder, which all nodes see.
        batch_size: the parameters' table of rows: one entry for each node, by its rank or its host's name.
        timeout_seconds: after which a process gives up others that are silent.
        on_lost_node: what becomes of it when a node is lost: it stops, or the others go on with the same global batch.
        reads: the folders of data that it reads, so that a launcher can see whether they are there.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path
    run: Path
    batch_size: Mapping[str, int]
    timeout_seconds: int = 600
    on_lost_node: Literal["stop", "redistribute"] = "stop"
    reads: tuple[Path, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """What would start a job, to be read before anything is started.

    Attributes:
        files: name -> content, to be written into the plan's folder.
        commands: lines for a shell, in their order, which start the job from anywhere.
        notes: what else one should know, a sentence each.
    """

    files: Mapping[str, str]
    commands: Sequence[str]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class JobState:
    """What a place says of a job that it was given.

    Attributes:
        word: the state in the place's own word: PENDING, InProgress.
        told: what else there is to know: why it waits, where it runs, why it failed.
        over: whether nothing more comes of it; a job that is queued again is not over.
        failed: whether it is over and did not end well.
        values: numbers that the place itself has read in what the job printed, by name.
    """

    word: str
    told: str = ""
    over: bool = False
    failed: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


class SubmittedJob(Protocol):
    """A job that goes on without the command that submitted it. Every method may raise UserError: there is no such job,
    or its place does not answer."""

    def state(self) -> JobState:
        """How it is now."""

    def stop(self) -> str:
        """Asks it to save and leave; returns a sentence that says what was asked for."""

    def output(self) -> Iterator[str]:
        """The lines it has printed since this was called last."""

    def fetch(self, out: Path) -> str:
        """Brings what it made into the new folder `out`; returns a sentence that says what that is."""


class Launcher(Component):
    """A way to start a run: settings of the place, from which a job's files and commands follow."""

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """What would start `job`, were the plan's files in `folder`, an absolute path. Starts and writes nothing.

        Raises:
            UserError: the job does not fit the settings.
        """
        raise NotImplementedError

    def check(self, job: Job, folder: Path) -> None:
        """Looks at the place where `job` is to run, the plan's files lying in `folder`, and prints what it finds.
        Starts nothing: `launch --check` asks for it.

        Raises:
            UserError: the place is not as it should be; or, as it stands, there is nothing this could look at.
        """
        raise UserError(f"launch {type(self).__name__.lower()}: there is nothing to look at; leave out --check")

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Starts what was planned, its files lying in `folder`; returns the exit code, 0 if all is well.

        As it stands, runs the plan's commands, one after another until one fails, in this terminal. One whose jobs go
        on by themselves returns once it is submitted, and leaves a `launched.Note` in `folder`.
        """
        from terakoya.launch import run_commands

        return run_commands(plan.commands)

    @classmethod
    def submitted(cls, name: str) -> SubmittedJob:
        """The job that its place calls `name`.

        Raises:
            UserError: a launcher whose jobs end with the command that starts them.
        """
        raise UserError(
            f"launch {cls.__name__.lower()}: its runs live in the terminal that starts them: Ctrl-C stops one, and "
            "`terakoya status RUN` looks at it"
        )


KINDS: Mapping[str, type[Component]] = {
    "tokenizers": Tokenizer,
    "architectures": Architecture,
    "objectives": Objective,
    "optimizers": Optimizer,
    "schedules": Schedule,
    "exporters": Exporter,
    "importers": Importer,
    "trackers": Tracker,
    "launchers": Launcher,
}
"""Every kind of component, by the plural that its hook `register_<plural>` bears."""
