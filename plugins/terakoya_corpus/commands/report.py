"""`terakoya corpus report`: what is in a corpus, in a terminal, as a page and as JSON."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import reading
from terakoya.errors import UserError
from terakoya.log import console, progress_bar, translated
from terakoya.plugins.verbs import LANGUAGE_VARIABLE
from terakoya.preparation.options import Documents, PrepareOptions

logger = logging.getLogger("terakoya")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `corpus report`."""

    corpus: Annotated[
        list[str], typer.Argument(help="Files, folders and addresses, as for `terakoya prepare`.", metavar="CORPUS...")
    ]
    out: Annotated[Path | None, typer.Option(help="Also write one HTML page.", show_default=False)] = None
    clean: Annotated[Path | None, PrepareOptions] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
    processes: Annotated[int | None, PrepareOptions] = None
    documents: Annotated[Documents, PrepareOptions] = "blank"
    field: Annotated[str, PrepareOptions] = "text"
    encoding: Annotated[str | None, PrepareOptions] = None
    sample: Annotated[int, typer.Option(min=1000, help="The characters of the sample on which --clean is tried.")] = (
        16_000_000
    )


def command(options: Options) -> None:
    """Show what is in a corpus before anything is trained: files, encodings, scripts, lengths, duplicates, steps.

    The corpus is read once, and nothing is changed. Personal data is counted, and masked in every example.
    """
    import json

    from rich.table import Table
    from rich.text import Text

    from terakoya.atomic_files import check_writable, write_text
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.places import check_local
    from terakoya.process_pool import available_cores
    from terakoya_corpus.page import render_page
    from terakoya_corpus.report import report_corpus

    if options.out is not None:
        check_local(options.out, "an HTML file")
        if options.out.is_dir():
            raise UserError(f"--out {options.out}: expected an HTML file, got a folder")
        check_writable(options.out.parent)
    corpus = Corpus(find_files(options.corpus), **reading(options))
    with progress_bar("corpus report") as progress:
        report = report_corpus(
            corpus,
            options.clean,
            processes=options.processes or available_cores(),
            sample_characters=options.sample,
            progress=progress,
        )
    for file in report["files"]:
        if file["problem"]:
            logger.warning("%s", file["problem"])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, render_page(report, language=os.environ.get(LANGUAGE_VARIABLE) or "en"))
    if options.as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in summarise(report):
        table.add_row(translated(name), Text(value))
    console().print(table)
    if options.out is not None:
        console().print(f"{options.out}: written", markup=False, soft_wrap=True)
    words = ["--type", "mecab_wordpiece", "--out", "work/tokenizer"]
    clean = [] if options.clean is None else ["--clean", str(options.clean)]
    given = [("--field", options.field, "text"), ("--documents", options.documents, "blank")]
    given.append(("--encoding", options.encoding or "", ""))
    read = [word for name, value, default in given if value != default for word in (name, value)]
    next_command.show("tokenizer", "train", *options.corpus, *read, *clean, *words)


def summarise(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the rows of the table: a name, and the figures."""
    documents = report["documents"]

    def shares(counts: Mapping[str, int], total: int) -> str:
        ordered = sorted(counts.items(), key=lambda each: -each[1])
        return ", ".join(f"{translated(name)} {_share(count / max(1, total))}" for name, count in ordered)

    yield "documents", f"{documents:,}"
    yield "characters", f"{report['characters']:,}"
    yield "files", f"{len(report['files']):,} ({report['disk_bytes'] / 1e6:,.1f} MB)"
    yield "formats", _count(f"{each['format']} {each['compression']}".strip() for each in report["files"])
    yield "encodings", _count(translated(each["encoding"]) for each in report["files"] if each["encoding"])
    yield "scripts", shares(report["scripts"], documents)
    if report["languages"]:
        yield "languages", shares(report["languages"], report["sample"]["documents"])
    quantiles = report["lengths"]["quantiles"]
    names = {"0.1": "10 %", "0.5": "50 %", "0.9": "90 %"}
    yield "lengths in characters", ", ".join(f"{name} ≤ {quantiles[key]:,}" for key, name in names.items())
    yield "exact duplicates", _share(report["duplicates"]["share"])
    if report["lines"]["repeated"]:
        first = report["lines"]["repeated"][0]
        yield "most repeated line", f"{first['times']:,} × {first['text'][:60]}"
    if report["damage"]:
        yield "damaged text", shares(report["damage"], documents)
    if report["personal_data"]:
        found = {kind: each["documents"] for kind, each in report["personal_data"].items()}
        yield "personal data", shares(found, report["sample"]["documents"])
    if report["rejected"]:
        yield "rejected", ", ".join(f"{translated(name)} {count:,}" for name, count in report["rejected"].items())
    if (cleaning := report["cleaning"]) is not None:
        for step in cleaning["steps"]:
            yield "dropped by", f"{step['name']} {_share(step['share'])}"
        if cleaning["held_out"]:
            yield "held out", _share(cleaning["held_out"] / max(1, cleaning["documents"]))
        yield "kept", _share(cleaning["kept_share"])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %" if value >= 0.001 or not value else f"{100 * value:.2g} %"


def _count(names: Iterator[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in Counter(names).most_common())
