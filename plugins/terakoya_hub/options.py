"""What an upload is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

    from terakoya.conversion.elsewhere import Elsewhere


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    """What is uploaded, and what its card says. What the help of an option says is not repeated here.

    Attributes:
        source: RUN, RUN@STEP, RUN/checkpoints/step-..., or a folder that `export` wrote. An existing README.md is kept;
            a warning names the options that then change nothing.
        prompt: if the model fails on it, nothing is pushed.
        only: the only model to push of several; it becomes the repository itself.
        run: the run or checkpoint that an exported folder comes from. Of a run it is the checkpoint that the folder
            names, or the newest one where it names none.
        languages: None is Japanese where the vocabulary has kana, else none.
        try_model: (folder, prompt) -> the model's output.
        report: receives a line for each finished step.
        process: what loads the models elsewhere before they are pushed; None skips this.
    """

    source: Annotated[Path, typer.Argument(help="RUN, a checkpoint, or an exported folder.", metavar="DIR")]
    name: Annotated[str, typer.Option(help="The repository.", metavar="ORGANISATION/NAME")]
    prompt: Annotated[
        str | None, typer.Option(help="Try the model with this text first; the card shows the text and the output.")
    ] = None
    public: Annotated[bool, typer.Option("--public/--private", help="Whether everybody may read a new repository.")] = (
        False
    )
    also: Annotated[
        Sequence[Path], typer.Option(help="A file to push besides those of the model; may be repeated.", metavar="FILE")
    ] = ()
    only: Annotated[
        str | None, typer.Option(help="Upload only this one of several models: generator or discriminator.")
    ] = None
    run: Annotated[
        Path | None, typer.Option(help="For an exported folder: the run that it comes from, for the card.")
    ] = None
    evaluations: Annotated[
        Sequence[Path],
        typer.Option(
            "--evaluation", help="A file of `terakoya evaluate --out`, for the card; may be repeated.", metavar="FILE"
        ),
    ] = ()
    license: Annotated[str | None, typer.Option(help="The licence for the card, such as apache-2.0.")] = None
    datasets: Annotated[
        Sequence[str],
        typer.Option("--dataset", help="Where the text comes from: OWNER/NAME on the Hub, or words; may be repeated."),
    ] = ()
    dataset_license: Annotated[
        str | None, typer.Option(help="The licence of the text for the card, such as cc-by-sa-4.0.")
    ] = None
    languages: Annotated[
        list[str] | None,
        typer.Option(
            "--language",
            help="A language for the card, such as en; may be repeated. Default: ja where the vocabulary has kana.",
        ),
    ] = None
    authors: Annotated[
        Sequence[str], typer.Option("--author", help="Who made the model, for the card's citation; may be repeated.")
    ] = ()
    citation: Annotated[
        Path | None, typer.Option(help="A file with your own BibTeX entry for the card.", metavar="FILE")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False
    dry_run: Annotated[
        Path | None, typer.Option(help="Push nothing; write the files into this new folder.", metavar="FOLDER")
    ] = None
    try_model: Callable[[Path, str], str] | None = None
    report: Callable[[str], None] = lambda text: None
    process: Elsewhere | None = None

    def of_the_card(self) -> dict[str, Any]:
        """Returns what a card that exists makes useless, by the option of the command line."""
        return {
            "--run": self.run, "--evaluation": self.evaluations, "--license": self.license, "--dataset": self.datasets,
            "--dataset-license": self.dataset_license, "--language": self.languages, "--author": self.authors,
            "--citation": self.citation,
        }  # fmt: skip


@dataclass(frozen=True)
class UploadResult:
    """The result of an upload.

    Attributes:
        address: URL of the repository; "" after a dry run.
        commit: the repository's commit; None after a dry run.
        folder: the folder that a dry run wrote; else None.
        models: sub-folder -> Transformers class that loads the model.
    """

    address: str
    commit: str | None
    folder: Path | None
    models: dict[str, str]
