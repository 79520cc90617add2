"""The list of dropped documents, `rejects.jsonl` beside the plan: step, reason, file, line and number of characters.

What the reader rejects is listed, too, as of no step. The list has no text, which may hold personal data; who asks for
a list elsewhere (`--rejects FILE`) may ask for the text in it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from terakoya.atomic_files import check_writable, write_atomically
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Document, Reject
from terakoya.corpus.files import Source
from terakoya.errors import UserError
from terakoya.places import check_local
from terakoya_cleaning.cleaning import line_of

logger = logging.getLogger("terakoya")

REJECTS = "rejects.jsonl"
COMPARED = "compared with the other documents"
"""The reason of a step that decides by the notes of all documents."""

_asked: ContextVar[tuple[Path, bool] | None] = ContextVar("rejects", default=None)


def check_list(file: Path) -> None:
    """Raises UserError unless `file` can be the list."""
    check_local(file, "a file")
    if file.is_dir():
        raise UserError(f"--rejects {file}: expected a file, got a folder; give --rejects {file / REJECTS}")
    if file.suffix != ".jsonl":
        raise UserError(f"--rejects {file}: expected a name that ends in .jsonl, as the list is one of JSON lines")
    check_writable(file.parent)


@contextmanager
def listing_to(file: Path, *, with_text: bool = False) -> Iterator[None]:
    """Within the block, `write_list` writes to `file`, `with_text` or without."""
    token = _asked.set((file, with_text))
    try:
        yield
    finally:
        _asked.reset(token)


def write_list(corpus: Corpus, folder: Path, show: Callable[[str], str]) -> None:
    """Writes the file of `listing_to`, if there is one, from the list of the plan in `folder`. The text of dropped
    documents is read from `corpus`, which has no cleaning, and passes through `show`."""
    if (asked := _asked.get()) is None:
        return
    file, with_text = asked
    file.parent.mkdir(parents=True, exist_ok=True)
    with (folder / REJECTS).open("rb") as lines, write_atomically(file) as out:
        if with_text:
            for record in _with_text(corpus, map(orjson.loads, lines)):
                if "text" in record:
                    record["text"] = show(record["text"])
                out.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        else:
            shutil.copyfileobj(lines, out)
    logger.info("cleaning: the dropped documents are listed in %s", file)


def _with_text(corpus: Corpus, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields `records`, which are in the order of `corpus`, with the text of each document."""
    items = (item for block in corpus.blocks() for item in corpus.read(block) if isinstance(item, Document))
    for record in records:
        if record["step"] is None:
            yield record
            continue
        for item in items:
            if item.line == record["line"] and str(item.file) == record["file"]:
                yield {**record, "text": item.text}
                break


# ------------------------------------------------------------------------------------------------ parts of the plan


def dump_reasons(file: Source, rejects: Sequence[Reject], reasons: Sequence[tuple[int, str]]) -> bytes:
    """Returns what a part says beside its records: its file, what the reader rejects, and why steps drop the documents
    of which lines."""
    return orjson.dumps([str(file), [(each.line, each.reason) for each in rejects], reasons])


def list_part(names: Sequence[str], table: np.ndarray, verdicts: np.ndarray, told: bytes) -> bytes:
    """Returns the lines of the list for one part, in the order of its file.

    table: the records of its documents. verdicts: (n,) the index in `names` of the step that drops each; another number
    where none does. told: what `dump_reasons` returned.
    """
    file, rejects, reasons = orjson.loads(told)
    why = dict(reasons)
    listed: list[tuple[int, str | None, str, int | None]] = [(line, None, reason, None) for line, reason in rejects]
    for row in np.flatnonzero(verdicts < len(names)).tolist():
        line = line_of(int(table["place"][row]))
        listed.append((line, names[verdicts[row]], why.get(line, COMPARED), int(table["characters"][row])))
    listed.sort(key=lambda each: each[0])
    return b"".join(
        orjson.dumps(
            {"step": step, "reason": reason, "file": file, "line": line, "characters": characters},
            option=orjson.OPT_APPEND_NEWLINE,
        )
        for line, step, reason, characters in listed
    )
