"""The options of `terakoya compare`, filled in by the command line or by `terakoya_compare.compare.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from terakoya_evaluation.options import EvaluateOptions, Precision

if TYPE_CHECKING:
    import typer


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is compared, on what. What the help of an option says is not repeated here.

    Attributes:
        sources: the first one is A, with which each of the others is compared.
        set_: settings of all recipes.
    """

    sources: Annotated[
        Sequence[Path],
        typer.Argument(
            metavar="A B...",
            help="Runs, RUN@STEP, checkpoints and Transformers folders; or parameter files and presets, which are "
            "trained.",
        ),
    ]
    stores: Annotated[
        Sequence[Path],
        typer.Option(
            "--validation",
            metavar="STORE",
            help="A token store of held-out text; may be repeated. Default for runs and recipes: A's own.",
        ),
    ] = ()
    corpus: Annotated[
        Sequence[str], typer.Option(metavar="FILE", help="Held-out raw text, of which each model makes its own tokens.")
    ] = ()
    tasks: Annotated[
        Sequence[str],
        typer.Option(
            "--task",
            metavar="TASK",
            help="A suite file, a suite (jglue) or a task (jsts), for which models are fine-tuned; may be repeated.",
        ),
    ] = ()
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="With --task: the folder of its files.")] = None
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of recipes and of fine-tuning. Default: 3; for tasks, the suite's.")
    ] = None
    changes: Annotated[
        Sequence[str],
        typer.Option("--change", metavar="KEY=VALUE", help="One more recipe: A with this key; may be repeated."),
    ] = ()
    set_: Annotated[
        Sequence[str], typer.Option("--set", metavar="KEY=VALUE", help="A setting of all recipes; may be repeated.")
    ] = ()
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for the runs of recipes; a comparison that was stopped goes on from there."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Largest number of rows, documents or examples of each set.")
    ] = None
    batch_tokens: Annotated[int, typer.Option(min=1, help="Positions computed at once; fewer need less memory.")] = 4096
    precision: Annotated[
        Precision | None, typer.Option(help="Default: fp32; for runs, their own; for tasks, bf16 where that is fast.")
    ] = None
    device: Annotated[str | None, typer.Option(help="Default: the first GPU, or the CPU.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that a model's folder contains.")
    ] = False

    def of(self, source: Path) -> EvaluateOptions:
        """Returns how one of the sources is measured on the stores and corpora."""
        return EvaluateOptions(
            source=source, stores=self.stores, corpus=self.corpus, limit=self.limit, batch_tokens=self.batch_tokens,
            precision=self.precision, device=self.device, trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
