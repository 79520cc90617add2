"""`terakoya tokenizer`: trains a tokenizer on raw text, or imports a trained model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import typer

from terakoya.commands.cleaning import CleanFolderOption, CleanOption
from terakoya.commands.component_settings import ACCEPT_UNKNOWN_OPTIONS, gather, read_settings, take_flags
from terakoya.commands.tokenizer import count as count_words
from terakoya.commands.tokenizer import report as tokenizer_report
from terakoya.errors import UserError
from terakoya.process_pool import available_cores

if TYPE_CHECKING:
    from terakoya.corpus.cleaning_steps import StepsOrFile

Documents = Literal["blank", "line"]

app = typer.Typer(help="Train, import and inspect tokenizers.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def describe() -> None:
    """Train, import and inspect tokenizers."""


app.command("report")(tokenizer_report.command)
count_words.register(app)


def train_tokenizer(
    sources: Sequence[Path | str],
    out: Path,
    *,
    type: str,
    settings: Mapping[str, Any] | None = None,
    processes: int | None = None,
    documents: Documents = "blank",
    field: str = "text",
    clean: StepsOrFile | None = None,
    clean_folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Mapping[str, Any]:
    """Trains a tokenizer of kind `type` on the files `sources` into the new folder `out`; returns facts about it.

    `clean`: cleaning steps, or a JSON file with a list of them; `clean_folder`, by default `OUT.clean` next to the
    tokenizer, keeps their decisions. Documents that a step `hold_out` holds out are not used for training.

    Raises UserError for errors that the user can fix; see `terakoya.tokenization.train.train_tokenizer`.
    """
    from terakoya.process_pool import warm_up

    out, processes = Path(out), processes or available_cores()
    if processes > 1:
        warm_up(["terakoya.toolkit.tokenizers.word_counts"])

    from terakoya.corpus.cleaning_plan import clean_corpus
    from terakoya.corpus.cleaning_steps import load_steps
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.tokenization.train import check_new_folder, make_tokenizer
    from terakoya.tokenization.train import train_tokenizer as train

    settings = {**(settings or {}), "type": type}
    corpus = Corpus(find_files(sources), field=field, documents=documents)
    make_tokenizer(settings)  # finds wrong settings before the corpus is cleaned
    check_new_folder(out)
    corpus = clean_corpus(corpus, load_steps(clean), clean_folder, out=out, processes=processes)
    return train(corpus, out, settings=settings, processes=processes, progress=progress)


def import_tokenizer(
    model: Path, out: Path, *, type: str, settings: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Makes a folder `out` that Transformers loads from the file of a trained model; returns facts about it.

    Raises UserError for errors that the user can fix, such as a kind that has no model files.
    """
    from terakoya.tokenization.train import check_new_folder, make_tokenizer

    kind = make_tokenizer({**(settings or {}), "type": type})
    if not isinstance(kind, ModelImporter):
        advice = "a tokenizer of Transformers is used as it is, by its folder"
        if ".json" in Path(model).suffixes:
            advice = f"put {model}, unpacked, into a folder of its own as tokenizer.json, and use that folder"
        raise UserError(f"--type {type}: this kind has no model files to import: {advice}")
    out = Path(out)
    check_new_folder(out)
    staging = out.with_name(f".{out.name}.staging-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        facts = kind.import_file(Path(model), staging)
        if out.exists():
            out.rmdir()
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return facts


@runtime_checkable
class ModelImporter(Protocol):
    """A kind of tokenizer that can import a model trained by another program."""

    def import_file(self, file: Path, folder: Path) -> Mapping[str, Any]:
        """Writes `folder` from the model `file`; returns facts for the record."""


Kind = Annotated[
    str | None, typer.Option(help="The kind of tokenizer; see `terakoya plugins list`. Default: as in --settings.")
]
Settings = Annotated[Path | None, typer.Option(help="A JSON or YAML file with the kind's settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the kind; overrides --settings; repeatable."),
]
Out = Annotated[Path | None, typer.Option(help="The new tokenizer's folder.", show_default=False)]


@app.command("train", context_settings=ACCEPT_UNKNOWN_OPTIONS)
def command(
    corpus: Annotated[
        list[str] | None,
        typer.Argument(help="jsonl, txt, csv, tsv (.gz, .zst, .xz, .bz2 too), parquet; folders, s3://, gs://, hf://."),
    ] = None,
    out: Out = None,
    type: Kind = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each CPU.", show_default=False)] = None,
    documents: Annotated[Documents, typer.Option(help="What separates documents in txt files.")] = "blank",
    field: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    clean: CleanOption = None,
    clean_folder: CleanFolderOption = None,
    settings: Settings = None,
    set_: Set = None,
) -> None:
    """Train a tokenizer that Transformers loads.

    Every setting of the kind is an option too: --vocab-size 32000, --character_coverage=0.9995, --byte-fallback,
    --no-add-dummy-prefix; `terakoya plugins show KIND` lists them. The settings `input`, `output_dir` and
    `model_prefix` may replace CORPUS and --out.
    """
    from terakoya.log import progress_bar

    kind, kind_settings, sources = _read_arguments(corpus or (), type=type, settings=settings, overrides=set_ or ())
    sources, out = _take_paths(kind_settings, sources, out)
    with progress_bar("tokenizer") as progress:
        facts = train_tokenizer(
            sources,
            out,
            type=kind,
            settings=kind_settings,
            processes=processes,
            documents=documents,
            field=field,
            clean=clean,
            clean_folder=clean_folder,
            progress=progress,
        )
    _print_facts(out, facts)


@app.command("import", context_settings=ACCEPT_UNKNOWN_OPTIONS)
def import_command(
    model: Annotated[list[str], typer.Argument(help="The trained model's file, for example tokenizer.model.")],
    out: Out = None,
    type: Kind = None,
    settings: Settings = None,
    set_: Set = None,
) -> None:
    """Make a folder that Transformers loads from the file of a trained model. Settings are options, as for train."""
    kind, kind_settings, sources = _read_arguments(model, type=type, settings=settings, overrides=set_ or ())
    if len(sources) != 1 or out is None:
        raise UserError("expected the file of one model, and --out, the new folder")
    _print_facts(out, import_tokenizer(Path(sources[0]), out, type=kind, settings=kind_settings))


def _read_arguments(
    arguments: Sequence[str], *, type: str | None, settings: Path | None, overrides: Sequence[str]
) -> tuple[str, dict[str, Any], list[str]]:
    """Returns the name of the kind, its settings, and the arguments that are not flags."""
    from terakoya import plugins

    file = read_settings(settings) if settings is not None else {}
    kind = gather(file, overrides, {} if type is None else {"type": type}, where=str(settings)).pop("type", None)
    if not isinstance(kind, str):
        raise UserError("--type: expected the kind of tokenizer, for example --type mecab_wordpiece")
    component = plugins.registry().component("tokenizers", kind)
    rest, flags = take_flags(arguments, component.model_fields)
    file.pop("type", None)
    without_type = [override for override in overrides if override.partition("=")[0] != "type"]
    return kind, gather(file, without_type, flags, where=str(settings)), rest


def _take_paths(settings: dict[str, Any], sources: list[str], out: Path | None) -> tuple[list[str], Path]:
    """Returns corpus and folder; removes them from `settings`, which may have them under SentencePiece's names."""
    files = settings.pop("input", None)
    if files is not None and sources:
        raise UserError("the corpus is given twice, as CORPUS and as input; keep one")
    if files is not None:
        sources = files.split(",") if isinstance(files, str) else [str(file) for file in files]
    if not sources:
        raise UserError("CORPUS: expected at least one file or folder of text")
    names = [str(settings.pop(name)) for name in ("output_dir", "model_prefix") if name in settings]
    if names and out is not None:
        raise UserError("the new folder is given twice, as --out and as output_dir or model_prefix; keep one")
    if out is None and not names:
        raise UserError("--out: expected the new tokenizer's folder")
    return sources, out if out is not None else Path(*names)


def _print_facts(out: Path, facts: Mapping[str, Any]) -> None:
    from terakoya.log import console

    text = ", ".join(f"{name.replace('_', ' ')} {_format(value)}" for name, value in facts.items())
    console().print(f"{out}: {text}", soft_wrap=True, markup=False)


def _format(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_format(count)} {name}" for name, count in value.items()) or "0"
    return f"{value:,}" if isinstance(value, int) else str(value)
