"""Trains a tokenizer of any kind from settings: `terakoya.train_tokenizer`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from terakoya.atomic_files import check_new_folder, new_folder
from terakoya.components.tokenizer import RECORD
from terakoya.errors import UserError
from terakoya.process_pool import available_cores, warm_up

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.corpus.cleaning import StepsOrFile
    from terakoya.corpus.corpus import Corpus, Reading
    from terakoya.corpus.files import Source


def train_tokenizer(
    corpus: Corpus | Sequence[Source | str] | Path | str,
    out: Path | str,
    *,
    settings: Mapping[str, Any],
    processes: int | None = None,
    clean: StepsOrFile | None = None,
    clean_folder: Path | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **reading: Unpack[Reading],
) -> Mapping[str, Any]:
    """Trains a tokenizer on `corpus` and saves it in the new folder `out`, which appears only when it is complete.
    Returns the facts that the kind reports. Raises UserError for wrong settings, or if `out` exists and is not empty;
    and as `Corpus` and `clean_corpus` do.

    Args:
        corpus: a `Corpus`; or files, folders, patterns and places, which are read as a `Corpus` with the options
            `reading`: `documents`, `field`, `encoding`, `max_rejects`.
        settings: `type`, the kind of tokenizer, and the settings of that kind.
        processes: number of worker processes; by default one for each CPU.
        clean: cleaning steps, or a JSON file with a list of them. Documents that a step `hold_out` holds out are not
            used for training.
        clean_folder: where the decisions of the cleaning steps are kept; by default `OUT.clean` next to `out`.
        progress: is called from time to time with the number of bytes read and their total.
    """
    out, processes = Path(out), processes or available_cores()
    tokenizer = make_tokenizer(settings)
    _refuse_trained(out, settings["type"], tokenizer)
    check_new_folder(out)
    if processes > 1:
        warm_up(["terakoya.toolkit.tokenizers.word_counts"])

    from terakoya.corpus.beginnings import check_beginnings
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.plugins.cleaning import clean_corpus
    from terakoya.tokenization.languages import warn_of_lost_dakuten

    if not isinstance(corpus, Corpus):
        corpus = Corpus(find_files(corpus), **reading)
        check_beginnings(corpus)
    elif reading:
        raise UserError(f"{', '.join(reading)}: a Corpus has its own; leave them out")
    decisions = None if clean_folder is None else Path(clean_folder)
    corpus = clean_corpus(corpus, clean, decisions, out=out, processes=processes)
    check_has_documents(corpus)
    with new_folder(out) as folder:
        facts = tokenizer.train(corpus, folder, processes=processes, progress=progress)
        record_kind(folder, settings["type"], tokenizer)
    warn_of_lost_dakuten(tokenizer.encoder(out), tokenizer, out)
    return facts


def _refuse_trained(out: Path, kind: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if `out` is a trained tokenizer, with the settings in which the new one differs."""
    from terakoya.json_settings import read_json, short_json

    if not (out / RECORD).is_file():
        return
    record, now = read_json(out / RECORD), {"type": kind, **tokenizer.model_dump(mode="json")}
    before = {"type": record.get("type"), **(record.get("settings") or {})}
    changed = [
        f"{key} {short_json(before[key])} -> {short_json(now[key])}"
        for key in before.keys() & now.keys()
        if before[key] != now[key]
    ]
    found = f"other settings ({', '.join(sorted(changed))})" if changed else "these settings"
    raise UserError(
        f"{out}: already exists and is not empty: expected a new or empty folder, got a tokenizer that was trained "
        f"with {found}; use it (terakoya prepare CORPUS --tokenizer {shlex.quote(str(out))} --out STORE), choose "
        "another --out, or remove it to train it again"
    )


def record_kind(folder: Path, kind: str, tokenizer: Tokenizer) -> None:
    """Records in the tokenizer's `folder` of which `kind` it is and with which settings, unless the kind itself does:
    `recognise_tokenizer` then does not read it as another kind where a plugin is missing."""
    file = folder / RECORD
    if not file.exists():
        record = {"type": kind, "settings": tokenizer.model_dump(mode="json", exclude={"special_tokens_in_text"})}
        file.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", newline="\n")


def check_has_documents(corpus: Corpus) -> None:
    """Reads `corpus` up to its first document. Raises UserError if it has none, with what its cleaning has done or the
    reason of most rejects."""
    from terakoya.corpus.corpus import Document
    from terakoya.corpus.rejects import Rejects

    rejects = Rejects()
    for block in corpus.blocks():
        for item in corpus.read(block):
            if isinstance(item, Document):
                return
            rejects.add(item)
    files = ", ".join(map(str, corpus.sources[:3])) + (", ..." if len(corpus.sources) > 3 else "")
    if corpus.cleaning is not None and (hint := corpus.cleaning.explain_empty()) is not None:
        raise UserError(f"{files}: expected at least one document, {hint}")
    rejects.check(corpus.max_rejects)
    raise UserError(f"{files}: expected at least one document, got an empty corpus; give files that hold text")


def make_tokenizer(settings: Mapping[str, Any], *, source: str = "tokenizer") -> Tokenizer:
    """Returns the component that `settings["type"]` names, with the other settings. Raises UserError, whose message
    begins with `source`, for an unknown type, an unknown setting or a wrong value."""
    from terakoya import plugins
    from terakoya.plugins.create import create_component

    fields = dict(settings)
    kind = fields.pop("type", None)
    names = plugins.registry().names("tokenizers")
    if not isinstance(kind, str):
        raise UserError(f"{source}: type: expected one of {', '.join(names)}, got {kind!r}")
    component: Tokenizer = create_component("tokenizers", kind, fields, where=source)
    return component
