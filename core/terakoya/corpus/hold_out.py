"""The last documents of a corpus set aside for validation, without copying more than its last file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from terakoya.corpus.corpus import Corpus, Document
from terakoya.corpus.files import Source, compression_of, format_of, open_decompressed
from terakoya.errors import UserError


def hold_out(corpus: Corpus, documents: int, folder: Path) -> tuple[list[Source], Path]:
    """Cuts the last `documents` documents off `corpus`.

    Its last file is written in two parts into `folder`, byte for byte, bad lines included; the other files stay where
    they are. Returns the files that are left for training and the file held out.

    Raises UserError unless the last file is jsonl or txt and holds more than `documents` documents.
    """
    *others, last = corpus.sources
    if format_of(last) not in ("jsonl", "txt"):
        raise UserError(
            f"hold_out: expected the corpus to end with a jsonl or txt file, got {last}; give validation_corpus, or "
            'let the step "hold_out" of "clean" choose documents'
        )
    starts: deque[int] = deque(maxlen=documents)
    total = 0
    single = Corpus(
        [last],
        field=corpus.field,
        documents=corpus.documents,
        max_document_bytes=corpus.max_document_bytes,
        block_bytes=corpus.block_bytes,
    )
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
    stem, suffix = _split_name(last)
    kept, held = folder / f"{stem}.train{suffix}", folder / f"{stem}.held_out{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        parts = [stack.enter_context(_part(path).open("wb")) for path in (kept, held)]
        for number, line in enumerate(_raw_lines(last), start=1):
            parts[number >= starts[0]].write(line)
    for path in (kept, held):
        _part(path).replace(path)
    return [*others, kept], held


def _split_name(file: Source) -> tuple[str, str]:
    """`wiki.jsonl.gz` -> (`wiki`, `.jsonl`)."""
    name = Path(file.name).stem if compression_of(file) is not None else file.name
    return Path(name).stem, Path(name).suffix


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _raw_lines(file: Source) -> Iterator[bytes]:
    with open_decompressed(file) as (stream, _):
        yield from stream
