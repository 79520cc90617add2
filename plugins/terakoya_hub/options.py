"""What an upload is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terakoya.conversion.elsewhere import Elsewhere


@dataclass(frozen=True)
class UploadOptions:
    """What is uploaded, and what its card says.

    Attributes:
        source: RUN, RUN@STEP, RUN/checkpoints/step-..., or a folder that `export` wrote. An existing README.md is kept;
            a warning names the options that then change nothing.
        name: the repository, ORGANISATION/NAME.
        prompt: a text to try the model with before the push. The output is reported and written into the card; if the
            model fails, nothing is pushed.
        public: whether everybody may read a new repository.
        also: files to push besides those of the model.
        only: the only model to push of several; it becomes the repository itself.
        run: the run or checkpoint that an exported folder comes from, for the card. Of a run it is the checkpoint that
            the folder names, or the newest one where it names none.
        evaluations: files that `terakoya evaluate --out` wrote, for the card and its metadata.
        license: the Hub's identifier of the licence, such as "apache-2.0", for the card.
        datasets: where the text comes from, names on the Hub or words, for the card.
        dataset_license: the licence of the text, for the card.
        languages: codes of the languages, for the card; None is Japanese where the vocabulary has kana, else none.
        authors: who made the model, for the card's citation.
        citation: a file with the authors' own entry of BibTeX, for the card.
        trust_remote_code: whether to run Python code of the model when it is tried and loaded back.
        dry_run: a new folder to write instead of pushing.
        try_model: (folder, prompt) -> the model's output.
        report: receives a line for each finished step.
        process: what loads the models elsewhere before they are pushed; None skips this.
    """

    source: Path
    name: str
    prompt: str | None = None
    public: bool = False
    also: Sequence[Path] = ()
    only: str | None = None
    run: Path | None = None
    evaluations: Sequence[Path] = ()
    license: str | None = None
    datasets: Sequence[str] = ()
    dataset_license: str | None = None
    languages: Sequence[str] | None = None
    authors: Sequence[str] = ()
    citation: Path | None = None
    trust_remote_code: bool = False
    dry_run: Path | None = None
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
