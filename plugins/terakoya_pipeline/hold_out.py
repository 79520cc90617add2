"""Holds out the last documents of a corpus for validation; only the last file is copied."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from terakoya.atomic_files import write_atomically
from terakoya.corpus.corpus import Corpus, Document
from terakoya.corpus.files import Source, compression_of, format_of
from terakoya.corpus.utf8_reader import open_text
from terakoya.errors import UserError


def hold_out(corpus: Corpus, documents: int, folder: Path) -> tuple[list[Source], Path]:
    """Splits the last `documents` documents off `corpus`.

    Writes the last file in two parts into `folder`, as UTF-8, bad lines included; the other files stay where they
    are. Returns the files for training and the held-out file.

    Raises UserError unless the last file is jsonl or txt and has more than `documents` documents.
    """
    *others, last = corpus.sources
    if format_of(last) not in ("jsonl", "txt"):
        raise UserError(
            f"hold_out: expected the corpus to end with a jsonl or txt file, got {last}; give validation_corpus, or "
            'let the step "hold_out" of "clean" choose documents'
        )
    starts: deque[int] = deque(maxlen=documents)
    total = 0
    single = replace(corpus, sources=(last,), cleaning=None, digests=None)
    for block in single.blocks():
        for document in single.read(block):
            if isinstance(document, Document):
                starts.append(document.line)
                total += 1
    if total <= documents:
        raise UserError(
            f"hold_out: expected fewer documents than the last file has ({last}: {total:,}), got {documents:,}; "
            "hold out fewer or give validation_corpus"
        )
    plain = Path(Path(last.name).stem if compression_of(last) is not None else last.name)
    train_file, held_out_file = (folder / f"{plain.stem}.{part}{plain.suffix}" for part in ("train", "held_out"))
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        parts = [stack.enter_context(write_atomically(path)) for path in (train_file, held_out_file)]
        for number, line in enumerate(stack.enter_context(open_text(last, corpus.encoding)), start=1):
            parts[number >= starts[0]].write(line if line.endswith(b"\n") else line + b"\n")
    return [*others, train_file], held_out_file
