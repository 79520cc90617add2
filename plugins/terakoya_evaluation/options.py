"""The options of `terakoya evaluate`, filled in by the command line or by `terakoya.evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.preparation.options import Documents, PrepareOptions

if TYPE_CHECKING:
    import typer

    from terakoya.corpus.corpus import Corpus, Reading

Measure = Literal["auto", "objective", "perplexity", "pseudo-perplexity"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What is measured of which model, and how. What the help of an option says is not repeated here.

    Attributes:
        source: a run is its newest whole checkpoint; RUN@STEP is another one.
        corpora: name -> texts.
        measure: `auto` is the objective for a run or checkpoint on stores, and for everything else perplexity (causal
            models) or pseudo-perplexity (masked models).
        length, stride: of the windows over long documents, in tokens. For suites, `length` is the largest number of
            tokens of an input.
        batch_tokens: largest number of positions in a batch, with padding.
        precision: for the objective of an fp8 run bf16.
    """

    source: Annotated[Path, typer.Argument(help="A Transformers folder, a checkpoint or a run.", metavar="DIR")]
    stores: Annotated[
        Sequence[Path],
        typer.Option(
            "--data",
            metavar="STORE",
            help="A token store; may be repeated. Default for a run: its validation stores. For suites: the folder of "
            "their files.",
        ),
    ] = ()
    corpora: Mapping[str, Corpus] | None = None
    corpus: Annotated[
        Sequence[str], typer.Option(metavar="FILE", help="Raw text (jsonl, txt, parquet ...); may be repeated.")
    ] = ()
    field: Annotated[str, PrepareOptions] = "text"
    documents: Annotated[Documents, PrepareOptions] = "blank"
    encoding: Annotated[str | None, PrepareOptions] = None
    measure: Annotated[
        Measure,
        typer.Option(
            help="What to measure; auto: the measure that fits the model, and the objective for a run on stores."
        ),
    ] = "auto"
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of documents, lines or rows of each data set; pseudo-perplexity: by default 100.",
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that the model sees at once; default: a run's longest rows, else the model's limit, at most "
            "2048; for suites, theirs.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window over a long document to the next; default: half of --length."),
    ] = None
    start_token: Annotated[
        bool,
        typer.Option(
            help="Begin documents with BOS (or EOS if there is no BOS), so that the first token is scored too."
        ),
    ] = True
    batch_tokens: Annotated[int, typer.Option(min=1, help="Positions computed at once; fewer need less memory.")] = 4096
    precision: Annotated[
        Precision | None,
        typer.Option(help="Default: fp32; for the objective, the run's own; to fine-tune, bf16 where that is fast."),
    ] = None
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False

    @property
    def has_texts(self) -> bool:
        """Whether there is text to measure the model on."""
        return bool(self.stores or self.corpora or self.corpus)

    def texts(self) -> dict[str, Corpus]:
        """Returns the texts by name. Raises UserError for a file that is none."""
        from terakoya.corpus.corpus import Corpus
        from terakoya.corpus.files import find_files

        how: Reading = {"documents": self.documents, "field": self.field, "encoding": self.encoding}
        return {**(self.corpora or {}), **{file: Corpus(find_files([file]), **how) for file in self.corpus}}

    def checkpoint(self) -> Path | None:
        """Returns the checkpoint that is measured; None for a Transformers folder. Raises UserError where there is
        neither."""
        from terakoya.runs.finding import find_checkpoint, names_checkpoint

        if names_checkpoint(self.source):
            return find_checkpoint(self.source)
        if not self.source.exists():
            there = describe_found(self.source, "Transformers model")
            raise UserError(f"{self.source}: expected a Transformers folder, a checkpoint or a run, got {there}")
        return None

    @property
    def model_precision(self) -> Precision:
        """The precision of a finished model, which has none of its own."""
        return self.precision or "fp32"

    @property
    def windows(self) -> dict[str, int]:
        """Option of the command line -> its value, of those given that are for perplexity alone."""
        given = {"--length": self.length, "--stride": self.stride}
        return {option: value for option, value in given.items() if value is not None}
