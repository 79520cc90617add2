"""`terakoya tokenizer`: trains a tokenizer on raw text, or imports a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terakoya.commands.component_settings import gather, take_flags
from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import complete_tokenizer, reading
from terakoya.errors import UserError
from terakoya.log import announce, console, progress_bar, translated
from terakoya.preparation.options import Documents, PrepareOptions

Kind = Annotated[
    str | None, typer.Option(help="The kind of tokenizer; see `terakoya plugins list`. Default: as in --settings.")
]
Settings = Annotated[Path | None, typer.Option(help="A JSON or YAML file with the kind's settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting of the kind; overrides --settings; repeatable.",
        autocompletion=complete_tokenizer,
    ),
]
Out = Annotated[Path | None, typer.Option(help="The new tokenizer's folder.", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `tokenizer train`."""

    corpus: Annotated[
        Sequence[str],
        typer.Argument(help="jsonl, txt, csv, tsv (.gz, .zst, .xz, .bz2 too), parquet; folders, s3://, gs://, hf://."),
    ] = ()
    out: Out = None
    type: Kind = None
    processes: Annotated[int | None, PrepareOptions] = None
    documents: Annotated[Documents, PrepareOptions] = "blank"
    field: Annotated[str, PrepareOptions] = "text"
    encoding: Annotated[str | None, PrepareOptions] = None
    max_rejects: Annotated[int | float, PrepareOptions] = 0.01
    clean: Annotated[Path | None, PrepareOptions] = None
    clean_folder: Annotated[Path | None, PrepareOptions] = None
    settings: Settings = None
    set_: Set = None


def train(options: TrainOptions) -> None:
    """Train a tokenizer that Transformers loads.

    Every setting of the kind is an option too: --vocab-size 32000, --character_coverage=0.9995, --byte-fallback,
    --no-add-dummy-prefix; `terakoya plugins show KIND` lists them. The settings `input`, `output_dir` and
    `model_prefix` may replace CORPUS and --out.
    """
    from terakoya.plugins.cleaning import plan_folder
    from terakoya.tokenization.train import train_tokenizer

    kind_settings, sources = _read_arguments(options.corpus, options.type, options.settings, options.set_)
    sources, out = _take_paths(kind_settings, sources, options.out)
    announce("terakoya tokenizer train: looks at the corpus ...")
    with progress_bar("tokenizer") as progress:
        facts = train_tokenizer(
            sources, out, settings=kind_settings, processes=options.processes, clean=options.clean,
            clean_folder=options.clean_folder, progress=progress, **reading(options),
        )  # fmt: skip
    _print_facts(out, facts)
    plan = options.clean_folder or plan_folder(out)
    next_command.after_tokenizer(out, sources, next_command.reading_words(options, plan))


def import_tokenizer(
    model: Annotated[list[str], typer.Argument(help="The trained model's file, for example tokenizer.model.")],
    out: Out = None,
    type: Kind = None,
    settings: Settings = None,
    set_: Set = None,
) -> None:
    """Make a folder that Transformers loads from the file of a trained model. Settings are options, as for train."""
    from terakoya.tokenization.import_model import import_tokenizer

    kind_settings, sources = _read_arguments(model, type, settings, set_)
    if len(sources) != 1 or out is None:
        raise UserError("expected the file of one model, and --out, the new folder")
    _print_facts(out, import_tokenizer(Path(sources[0]), out, settings=kind_settings))
    next_command.after_tokenizer(out, ())


def _read_arguments(
    arguments: Sequence[str], type: str | None, settings: Path | None, overrides: Sequence[str] | None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings, among them the kind as `type`, and the arguments that are not flags."""
    from terakoya import plugins
    from terakoya.json_settings import read_settings

    overrides = overrides or ()
    file = read_settings(settings) if settings is not None else {}
    kind = gather(file, overrides, {} if type is None else {"type": type}, where=str(settings)).pop("type", None)
    if not isinstance(kind, str):
        raise UserError("--type: expected the kind of tokenizer, for example --type mecab_wordpiece")
    component = plugins.registry().component("tokenizers", kind)
    rest, flags = take_flags(arguments, component.model_fields, verb="tokenizer train")
    file.pop("type", None)
    without_type = [override for override in overrides if override.partition("=")[0] != "type"]
    return {**gather(file, without_type, flags, where=str(settings)), "type": kind}, rest


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
    def format_value(value: object) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{count:,} ({translated(name)})" for name, count in value.items()) or "0"
        return f"{value:,}" if isinstance(value, int) else str(value)

    told = {name: value for name, value in facts.items() if value or name != "count_error"}
    text = ", ".join(f"{translated(name.replace('_', ' '))} {format_value(value)}" for name, value in told.items())
    console().print(f"{out}: {text}", soft_wrap=True, markup=False)
