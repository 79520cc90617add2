"""The plan of a cleaning: one pass over the corpus, in parallel and resumable, that decides about every document.

What a document alone decides is decided in the processes, block by block, each leaving a part on disk; duplicates are
then found in the parts, in the order of the corpus. So the plan depends on corpus and settings alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from terakoya.atomic_files import committed, locked
from terakoya.corpus.cleaning import PLAN, Cleaning
from terakoya.corpus.cleaning_steps import ExactDuplicates, HoldOut, NearDuplicates, Step
from terakoya.corpus.deduplication import mark_exact_duplicates, mark_near_duplicates, minhash_signature
from terakoya.corpus.documents import Block, Document
from terakoya.errors import UserError
from terakoya.process_pool import workers

if TYPE_CHECKING:
    from terakoya.corpus.corpus import Corpus

logger = logging.getLogger("terakoya")

KEPT = 255
"""The verdict on a document that no step drops; otherwise the number of the step that does."""

_EXCERPT_BYTES = 72
_EXAMPLES = 3


def clean_corpus(
    corpus: Corpus, steps: Sequence[Step], folder: Path | None, *, out: Path, processes: int, held_out: bool = False
) -> Corpus:
    """Returns `corpus` after `steps`, with its plan made: what the options of the commands mean.

    Leaves out what a step `hold_out` sets aside, or with `held_out` reads only those documents. The plan is in
    `folder`, by default `OUT.clean` next to `out`; a plan that is already there is used again.

    Raises UserError for `held_out` without the step `hold_out`, and for a folder without steps.
    """
    if not steps:
        if held_out:
            raise UserError('--held-out: expected --clean with a step {"type": "hold_out", "share": ...}')
        if folder is not None:
            raise UserError("--clean-folder: expected --clean with it, the steps whose decisions it notes")
        return corpus
    corpus = corpus.with_cleaning(steps, folder or out.with_name(f"{out.name}.clean"), held_out=held_out)
    make_plan(corpus, processes=processes)
    return corpus


def make_plan(
    corpus: Corpus, *, processes: int = 1, name: str = "", progress: Callable[[int, int], None] | None = None
) -> dict[str, int]:
    """Decides which documents of `corpus` (made by `Corpus.with_cleaning`) stay, unless that is on disk already.

    Logs how many documents each step drops, with three examples, and `name` where there are several corpora. Returns
    the counts. The next call continues an interrupted one. Memory: a block of text in each process; about 250 MB at
    most for exact duplicates; for near duplicates see `mark_near_duplicates`. Disk while it works: 100 bytes for each
    document, and with near duplicates 4 more for each permutation.

    Raises UserError when a process dies or a file is damaged.
    """
    cleaning = corpus.cleaning
    assert cleaning is not None, "the corpus has no cleaning steps"
    raw = replace(corpus, cleaning=None)
    block_bytes = max(1 << 20, min(32 << 20, raw.total_bytes // 64))
    facts = [raw.fingerprint, raw.field, raw.documents, raw.max_document_bytes, block_bytes]
    settings = json.loads(cleaning.settings)
    settings.pop("side")  # one plan serves both
    key = hashlib.sha256(json.dumps([facts, [str(file) for file in cleaning.files], settings]).encode()).hexdigest()
    folder = cleaning.folder
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not _has(folder / PLAN, key):
            (folder / PLAN).unlink(missing_ok=True)
            parts = folder / "parts"
            if not _has(parts / "key.json", key):
                shutil.rmtree(parts, ignore_errors=True)
                parts.mkdir()
                _write(parts / "key.json", {"key": key})
            _survey(raw, cleaning, parts, block_bytes, processes, progress)
            _decide(cleaning, parts, key)
            shutil.rmtree(parts)
        plan = json.loads((folder / PLAN).read_bytes())
    what = f"cleaning {name}".strip()
    for step, examples in plan["examples"].items():
        logger.info("%s: %s dropped %s of %s documents%s", what, step, f"{plan['counts'][f'dropped by {step}']:,}",
                    f"{plan['counts']['documents']:,}", "".join(f"\n    {each}" for each in examples))  # fmt: skip
    if "held out" in plan["counts"]:
        logger.info("%s: %s documents held out%s", what, f"{plan['counts']['held out']:,}",
                    "".join(f"\n    {each}" for each in plan.get("held_out", ())))  # fmt: skip
    return dict(plan["counts"])


def _has(file: Path, key: str) -> bool:
    return file.exists() and json.loads(file.read_bytes())["key"] == key


def _write(file: Path, value: object) -> None:
    with committed(file) as stream:
        stream.write(json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")


# -------------------------------------------------------------------------------------------------- each document


def _record_type(cleaning: Cleaning) -> np.dtype:
    fields: list[tuple] = [
        ("place", "<u8"), ("verdict", "u1"), ("held", "?"), ("hash", "<u8", (2,)), ("excerpt", f"S{_EXCERPT_BYTES}")
    ]  # fmt: skip
    for step in cleaning.steps:
        if isinstance(step, NearDuplicates):
            fields.append(("signature", "<u4", (step.permutations,)))
    return np.dtype(fields)


class _Surveyor:
    """Looks at the documents of one block after the other; belongs to one process."""

    def __init__(self, corpus: Corpus, cleaning: Cleaning, parts: Path) -> None:
        self._corpus, self._cleaning, self._parts = corpus, cleaning, parts
        self._type = _record_type(cleaning)

    def survey(self, number: int, block: Block) -> None:
        """Writes part `number`: a record for each document of `block`."""
        documents = [item for item in self._corpus.read(block) if isinstance(item, Document)]
        records = np.zeros(len(documents), self._type)
        for record, document in zip(records, documents, strict=True):
            record["place"] = self._cleaning.document_number(document.file, document.line)
            record["verdict"] = KEPT
            record["excerpt"] = document.text[:_EXCERPT_BYTES].encode()[:_EXCERPT_BYTES]
            self._judge(record, document.text)
        content = io.BytesIO()
        np.save(content, records)
        with committed(_part(self._parts, number)) as stream:
            stream.write(content.getvalue())

    def _judge(self, record: np.void, text: str) -> None:
        for number, step in enumerate(self._cleaning.steps):
            text = step.change(text)
            if not step.keeps(text):
                record["verdict"] = number
                return
            if isinstance(step, ExactDuplicates):
                record["hash"] = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")
            elif isinstance(step, NearDuplicates):
                record["signature"] = minhash_signature(text, step)
            elif isinstance(step, HoldOut):
                record["held"] = step.takes(text)


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}.npy"


def _survey(
    corpus: Corpus,
    cleaning: Cleaning,
    parts: Path,
    block_bytes: int,
    processes: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Makes every part that is not there yet."""
    done = 0

    def blocks() -> Iterator[tuple[int, Block]]:
        nonlocal done
        for number, block in enumerate(corpus.blocks(block_bytes=block_bytes)):
            if not _part(parts, number).exists():
                yield number, block
            done += block.disk_bytes
            if progress is not None:
                progress(done, corpus.total_bytes)

    if processes == 1:
        surveyor = _Surveyor(corpus, cleaning, parts)
        for number, block in blocks():
            surveyor.survey(number, block)
        return
    kept = "What is done is kept: run the same command again"
    with workers(processes, _start_worker, (corpus, cleaning, parts), task="cleaning", remedy=kept) as submit:
        waiting: deque[Future[None]] = deque()
        for number, block in blocks():
            waiting.append(submit(_survey_block, number, block))
            if len(waiting) > 2 * processes:
                waiting.popleft().result()
        for future in waiting:
            future.result()


_surveyor: _Surveyor | None = None


def _start_worker(corpus: Corpus, cleaning: Cleaning, parts: Path) -> None:
    global _surveyor
    _surveyor = _Surveyor(corpus, cleaning, parts)


def _survey_block(number: int, block: Block) -> None:
    assert _surveyor is not None, "worker was not started"
    _surveyor.survey(number, block)


# -------------------------------------------------------------------------------------------------- all documents


def _decide(cleaning: Cleaning, parts: Path, key: str) -> None:
    """Finds duplicates and writes the plan: sorted places of what is dropped and held out, then counts and examples."""
    tables = [np.load(file, mmap_mode="r") for file in sorted(parts.glob("*.npy"))]
    total = sum(map(len, tables))
    verdicts = np.concatenate([np.zeros(0, "u1"), *(table["verdict"] for table in tables)])
    for number, step in enumerate(cleaning.steps):
        if isinstance(step, ExactDuplicates):
            mark_exact_duplicates(tables, verdicts, number)
        elif isinstance(step, NearDuplicates):
            mark_near_duplicates(tables, verdicts, number, step)
    names = _names(cleaning)
    dropped: Counter[int] = Counter()
    examples: dict[int, list[str]] = {number: [] for number, name in enumerate(names) if name}
    aside_examples: list[str] = []
    held, start = 0, 0
    with committed(cleaning.folder / "dropped.u8") as left_out, committed(cleaning.folder / "held_out.u8") as held_out:
        for table in tables:
            verdict = verdicts[start : start + len(table)]
            start += len(table)
            left_out.write(np.ascontiguousarray(table["place"][verdict != KEPT]))
            aside = np.flatnonzero((verdict == KEPT) & table["held"])
            held_out.write(np.ascontiguousarray(table["place"][aside]))
            held += len(aside)
            aside_examples += [_example(cleaning, table[at]) for at in aside[: _EXAMPLES - len(aside_examples)]]
            for number, shown in examples.items():
                found = np.flatnonzero(verdict == number)
                dropped[number] += len(found)
                shown += [_example(cleaning, table[at]) for at in found[: _EXAMPLES - len(shown)]]
    counts = {"documents": total, **{f"dropped by {names[number]}": dropped[number] for number in examples}}
    if isinstance(cleaning.steps[-1], HoldOut):
        counts["held out"] = held
    counts["kept"] = total - sum(dropped.values()) - held
    named = {names[number]: shown for number, shown in examples.items()}
    facts = {"key": key, "counts": counts, "examples": named, "held_out": aside_examples, "settings": cleaning.settings}
    _write(cleaning.folder / PLAN, facts)


def _names(cleaning: Cleaning) -> list[str]:
    """The name of each step that can drop a document, "" for the others."""
    names: list[str] = []
    for step in cleaning.steps:
        name = f"characters ({step.of})" if step.type == "characters" else step.type
        name = "" if step.type in ("nfkc", "sentences", "hold_out") else name
        again = len([each for each in names if each.split(" #")[0] == name])
        names.append(f"{name} #{again + 1}" if name and again else name)
    return names


def _example(cleaning: Cleaning, record: np.void) -> str:
    place, excerpt = int(record["place"]), bytes(record["excerpt"])
    file, line = cleaning.files[place >> 40], place & (1 << 40) - 1
    text = " ".join(excerpt.decode(errors="ignore").split())
    return f"{file}:{line}: {text}" + ("…" if len(excerpt) >= _EXCERPT_BYTES - 3 else "")
