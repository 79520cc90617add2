"""The options of `terakoya evaluate`, filled in by the command line or by `terakoya.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from terakoya.corpus.corpus import Corpus
    from terakoya_quality.finetuning.search import Watch

Measure = Literal["auto", "objective", "perplexity", "pseudo-perplexity"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What is measured of which model, and how.

    Attributes:
        source: the model: a Transformers folder, a checkpoint, a run (its newest whole checkpoint), or RUN@STEP.
        stores: token stores; by default, a run is evaluated on its validation stores. For suites, the folder with
            their files.
        corpora: name -> texts.
        measure: `auto` is the objective for a run or checkpoint on stores, and for everything else perplexity (causal
            models) or pseudo-perplexity (masked models).
        limit: largest number of documents, lines (pseudo-perplexity) or rows (objective) of each data set.
        length, stride: of the windows over long documents, in tokens; by default the longest rows of training, of a
            run or checkpoint, else the model's limit, at most 2048; and half of that. For suites, `length` is the
            largest number of tokens of an input.
        start_token: whether to begin each document with the tokenizer's BOS, or EOS if it has no BOS, so that the
            first token is scored too.
        batch_tokens: largest number of positions in a batch, with padding.
        precision: by default fp32; for the objective, the run's own, of an fp8 run bf16.
        device: by default the first GPU, or the CPU.
        tasks: names of lm-eval's tasks; or suites, their tasks and suite files, for which the model is fine-tuned; or
            benchmarks of mteb and their tasks, see `embedding.BENCHMARKS`.
        trust_remote_code: whether to run Python code that the folder contains.
        tuning: settings of the fine-tuning that replace those of the suites.
        watch: (title of a task) -> who follows its trainings.
    """

    source: Path
    stores: Sequence[Path] = ()
    corpora: Mapping[str, Corpus] | None = None
    measure: Measure = "auto"
    limit: int | None = None
    length: int | None = None
    stride: int | None = None
    start_token: bool = True
    batch_tokens: int = 4096
    precision: Precision | None = None
    device: str | None = None
    tasks: Sequence[str] = ()
    trust_remote_code: bool = False
    tuning: Mapping[str, Any] | None = None
    watch: Callable[[str], AbstractContextManager[Watch]] | None = None

    @property
    def model_precision(self) -> Precision:
        """The precision of a finished model, which has none of its own."""
        return self.precision or "fp32"

    @property
    def windows(self) -> dict[str, int]:
        """Option of the command line -> its value, of those given that are for perplexity alone."""
        given = {"--length": self.length, "--stride": self.stride}
        return {option: value for option, value in given.items() if value is not None}

    @property
    def tuned(self) -> dict[str, Any]:
        """Option of the command line -> its value, of the settings in `tuning`."""
        return {
            f"--{name.replace('learning_rates', 'learning_rate').replace('_', '-')}": value
            for name, value in (self.tuning or {}).items()
        }
