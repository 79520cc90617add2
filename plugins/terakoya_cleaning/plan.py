"""The plan of a cleaning: one pass over the corpus, in parallel and resumable, decides which documents to drop.

Worker processes decide what depends on one document only; for each block they write a part to disk. Duplicates are then
found in the parts, in the order of the corpus. So the plan depends only on the corpus and the settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from terakoya.atomic_files import lock_folder, write_atomically
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Block, Document, Reject
from terakoya.corpus.files import Source
from terakoya.errors import UserError
from terakoya.log import translated
from terakoya.preparation.sharding import Shard
from terakoya.process_pool import in_order
from terakoya_cleaning.cleaning import PLAN, Cleaning
from terakoya_cleaning.notes import ArraysOnDisk, save_array
from terakoya_cleaning.reading import NamedStep, show_text
from terakoya_cleaning.rejects import REJECTS, dump_reasons, list_part, write_list
from terakoya_cleaning.steps import HoldOut

logger = logging.getLogger("terakoya")

PARTS = ".cleaning"
"""The folder of an unfinished plan; a user's own folder has another name."""

KEPT = 255
"""The verdict on a document that no step drops; for other documents it is the index of the step that drops it."""

_REASONS = ".reasons"
_FOUND = ".found.json"
_EXCERPT_BYTES = 72
_SHOWN_CHARACTERS = 1024  # more than an excerpt, so that `CleaningStep.show` sees whole what the excerpt cuts
_EXAMPLES = 3


class PlannedCleaning(Cleaning):
    """A cleaning that makes its plan."""

    def make_plan(self, corpus: Corpus, *, processes: int, name: str = "") -> object:
        return make_plan(corpus, processes=processes, name=name)


def add_cleaning(corpus: Corpus, steps: Sequence[NamedStep], folder: Path, *, held_out: bool = False) -> Corpus:
    """Returns `corpus` after the cleaning `steps`, whose plan is in `folder`; with `held_out`, only the held-out
    documents.

    Reads no document: `make_plan` does. Raises UserError for `held_out` without the step
    `hold_out`, and for a file given twice.
    """
    splits = any(isinstance(each.step, HoldOut) for each in steps)
    if held_out and not splits:
        raise UserError('held_out: expected a step {"type": "hold_out", "share": ...} in the list of cleaning steps')
    files = tuple(corpus.sources)
    if repeated := sorted(name for name, count in Counter(map(str, files)).items() if count > 1):
        raise UserError(f"{repeated[0]}: is given twice; give it once to clean it")
    side: Literal["all", "train", "held_out"] = "held_out" if held_out else "train" if splits else "all"
    return replace(corpus, cleaning=PlannedCleaning(tuple(steps), Path(folder), files, side))


def make_plan(corpus: Corpus, *, processes: int = 1, name: str = "") -> dict[str, int]:
    """Decides which documents of `corpus` (from `add_cleaning`) stay, unless the plan is on disk already.

    Logs how many documents each step drops, with three examples, and `name` where there are several corpora; of a plan
    on disk one line. Beside the plan lies a list of all that is dropped; see `terakoya_cleaning.rejects`. Returns the
    counts. The next call continues an interrupted one. Memory: a block of text in each
    process; about 250 MB at most for exact duplicates; for near duplicates see `find_near_duplicates`. Disk while it
    works: 100 bytes for each document, and with near duplicates 512 more at the default settings.

    Raises UserError when a process dies, a file is damaged, or a file is changed while it is read.
    """
    work = _Work.on(corpus)
    cleaning, folder, key = work.cleaning, work.cleaning.folder, work.key
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        is_new = not (_has_key(folder / PLAN, key) and (folder / REJECTS).exists())
        if is_new:
            (folder / PLAN).unlink(missing_ok=True)
            parts = work.write_parts(corpus.sources, processes)
            _write_plan(cleaning, parts, key)
            shutil.rmtree(parts)
        plan = json.loads((folder / PLAN).read_bytes())
        cleaning.remember_plan(key)
        write_list(work.raw, folder, partial(show_text, cleaning.steps))
    title = f"{translated('cleaning')} {name}".strip()
    if not is_new:
        logger.info("%s: %s", title, _summarise(plan["counts"], folder))
        return dict(plan["counts"])
    for step, found in plan["found"].items():
        logger.info("%s: %s found %s", title, step, ", ".join(f"{kind} {count:,}" for kind, count in found.items()))
    for step, examples in plan["examples"].items():
        dropped, documents = plan["counts"][f"dropped by {step}"], plan["counts"]["documents"]
        if not dropped and step in plan["found"]:
            continue
        logger.info(
            "%s: %s dropped %s of %s documents%s", title, step, f"{dropped:,}", f"{documents:,}", _indent(examples)
        )
    if "held out" in plan["counts"]:
        held_out = f"{plan['counts']['held out']:,}"
        logger.info("%s: %s documents held out%s", title, held_out, _indent(plan.get("held_out", ())))
    if any(count for name, count in plan["counts"].items() if name.startswith("dropped by ")):
        logger.info("%s: each dropped document is listed in %s: step, reason, file, line", title, folder / REJECTS)
    return dict(plan["counts"])


def write_shard(corpus: Corpus, shard: Shard, *, processes: int = 1) -> None:
    """Makes what `make_plan` needs to know of the files of one shard, and no plan yet.

    The folders of all shards, copied into one, are an unfinished plan there, which `make_plan` continues. A file
    belongs to the shard of its middle byte. Raises UserError as `make_plan`.
    """
    work = _Work.on(corpus)
    folder = work.cleaning.folder
    folder.mkdir(parents=True, exist_ok=True)
    files, at = [], 0
    for file in corpus.sources:
        size = file.stat().st_size
        if (2 * at + size) * shard.count // (2 * corpus.total_bytes or 1) == shard.number - 1:
            files.append(file)
        at += size
    with lock_folder(folder):
        if not _has_key(folder / PLAN, work.key):
            work.write_parts(files, processes)
    logger.info("cleaning: %s of %s files are read, for %s", len(files), len(corpus.sources), folder)


@dataclass(frozen=True)
class _Work:
    """A plan to be made.

    Attributes:
        raw: the corpus without the cleaning.
        sizes_and_times: of its files, before the first was read.
        key: a hash of all that the plan depends on.
    """

    raw: Corpus
    cleaning: Cleaning
    sizes_and_times: list[tuple[int, object]]
    block_bytes: int
    key: str

    @classmethod
    def on(cls, corpus: Corpus) -> _Work:
        """Reads all files for their hash."""
        cleaning = corpus.cleaning
        assert isinstance(cleaning, Cleaning), "the corpus has no cleaning steps"
        raw = replace(corpus, cleaning=None)
        sizes_and_times = raw.sizes_and_times()
        block_bytes = max(1 << 20, min(32 << 20, raw.total_bytes // 64))
        facts = [raw.fingerprint, raw.field, raw.documents, raw.max_document_bytes, block_bytes]
        facts += [raw.encoding] if raw.encoding is not None else []
        settings = json.loads(cleaning.settings)
        settings.pop("side")  # all sides share one plan
        whole = [facts, [str(file) for file in cleaning.files], settings]
        key = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
        return cls(raw, cleaning, sizes_and_times, block_bytes, key)

    def write_parts(self, files: Sequence[Source], processes: int) -> Path:
        """Writes the parts of `files` that are missing. Returns their folder."""
        parts = self.cleaning.folder / PARTS
        if not _has_key(parts / "key.json", self.key):
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir()
            _write_json(parts / "key.json", {"key": self.key})
        if files:
            _write_parts(replace(self.raw, sources=tuple(files)), self.cleaning, parts, self.block_bytes, processes)
        if self.raw.sizes_and_times() != self.sizes_and_times:
            shutil.rmtree(parts)
            raise UserError("corpus: a file was changed while it was read; leave the files alone and start again")
        return parts


def _summarise(counts: Mapping[str, int], folder: Path) -> str:
    """Returns one line about a plan that was made, and described, earlier."""
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped by "))
    if "held out" not in counts:
        return f"dropped {dropped:,} of {counts['documents']:,} documents, as {folder} says"
    held_out = counts["held out"]
    return f"dropped {dropped:,} of {counts['documents']:,} documents and held out {held_out:,}, as {folder} says"


def _indent(examples: Sequence[str]) -> str:
    return "".join(f"\n    {example}" for example in examples)


def _has_key(file: Path, key: str) -> bool:
    try:
        return file.exists() and bool(json.loads(file.read_bytes())["key"] == key)
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{file}: expected a plan of cleaning, got another file; choose another --clean-folder, or remove it"
        ) from None


def _write_json(file: Path, value: object) -> None:
    with write_atomically(file) as stream:
        stream.write(json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")


# --------------------------------------------------------------------------------------------------- one document


_RECORD = np.dtype(
    [("place", "<u8"), ("verdict", "u1"), ("held", "?"), ("characters", "<u4"), ("excerpt", f"S{_EXCERPT_BYTES}")]
)
"""The record of one document in a part; `place` is its `Cleaning.document_number`."""


class _PartWriter:
    """Writes what the steps decide about the documents of each block; belongs to one process."""

    def __init__(self, corpus: Corpus, cleaning: Cleaning, parts: Path) -> None:
        self._corpus, self._cleaning, self._parts = corpus, cleaning, parts
        types = {number: each.step.note_type for number, each in enumerate(cleaning.steps)}
        self._note_types = {number: kind for number, kind in types.items() if kind is not None}

    def write_part(self, number: int, block: Block) -> None:
        """Writes part `number`, that of the first line of `block`: a record of each document, after the notes of the
        steps, what they count by kind and what `dump_reasons` returns."""
        items = list(self._corpus.read(block))
        documents = [item for item in items if isinstance(item, Document)]
        reasons: list[tuple[int, str]] = []
        records = np.zeros(len(documents), _RECORD)
        notes = {step: np.zeros(len(documents), kind) for step, kind in self._note_types.items()}
        self._found = [Counter[str]() for _ in self._cleaning.steps]
        for row, (record, document) in enumerate(zip(records, documents, strict=True)):
            record["place"] = self._cleaning.document_number(document.file, document.line)
            record["verdict"] = KEPT
            record["characters"] = len(document.text)
            shown = show_text(self._cleaning.steps, document.text[:_SHOWN_CHARACTERS])
            record["excerpt"] = shown[:_EXCERPT_BYTES].encode()[:_EXCERPT_BYTES]
            own_notes = {step: array[row : row + 1] for step, array in notes.items()}
            if (why := self._fill_record(record, own_notes, document.text)) is not None:
                reasons.append((document.line, why))
        part = _part(self._parts, number)
        _write_json(part.with_suffix(_FOUND), self._found)
        with write_atomically(part.with_suffix(_REASONS)) as stream:
            rejects = [item for item in items if isinstance(item, Reject)]
            stream.write(dump_reasons(block.file, rejects, reasons))
        for step, array in notes.items():
            save_array(part.with_suffix(_note_suffix(step)), array)
        save_array(part, records)

    def _fill_record(self, record: np.void, notes: Mapping[int, np.ndarray], text: str) -> str | None:
        """Fills `record` and `notes`. Returns why a step drops the document, None if none does so far."""
        for number, step in enumerate(each.step for each in self._cleaning.steps):
            self._found[number].update(step.count(text))
            text = step.change(text)
            if not step.keeps(text):
                record["verdict"] = number
                return step.why(text)
            if step.note_type is not None:
                notes[number][0] = step.note(text)
            elif isinstance(step, HoldOut):
                record["held"] = step.holds_out(text)
        return None


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:020d}.npy"


def _note_suffix(step: int) -> str:
    return f".note{step}"


def _write_parts(corpus: Corpus, cleaning: Cleaning, parts: Path, block_bytes: int, processes: int) -> None:
    """Writes all missing parts."""
    blocks = (
        (cleaning.document_number(block.file, block.line), block) for block in corpus.blocks(block_bytes=block_bytes)
    )
    calls = ((number, (number, block)) for number, block in blocks if not _part(parts, number).exists())
    remedy = "Finished work is kept: run the same command again"
    for _ in in_order(calls, processes, _part_writer, (corpus, cleaning, parts), task="cleaning", remedy=remedy):
        pass


def _part_writer(corpus: Corpus, cleaning: Cleaning, parts: Path) -> Callable[[int, Block], None]:
    return _PartWriter(corpus, cleaning, parts).write_part


# -------------------------------------------------------------------------------------------------- all documents


def _write_plan(cleaning: Cleaning, parts: Path, key: str) -> None:
    """Finds duplicates and writes the plan: sorted numbers of dropped and held-out documents, counts and examples."""
    tables = ArraysOnDisk(parts, ".npy")
    total = sum(map(len, tables))
    verdicts = np.concatenate([np.zeros(0, "u1"), *(table["verdict"].copy() for table in tables)])
    for number, each in enumerate(cleaning.steps):
        if each.step.note_type is not None:
            dropped_now = each.step.drop(ArraysOnDisk(parts, _note_suffix(number)), verdicts > number)
            verdicts[dropped_now] = number
    names = _step_names(cleaning)
    found = [Counter[str]() for _ in names]
    for file in sorted(parts.glob(f"*{_FOUND}")):
        for all_found, part_found in zip(found, json.loads(file.read_bytes()), strict=True):
            all_found.update(part_found)
    dropped: Counter[int] = Counter()
    examples: dict[int, list[str]] = {number: [] for number, name in enumerate(names) if name}
    held_out_examples: list[str] = []
    held_out, start = 0, 0
    with (
        write_atomically(cleaning.folder / "dropped.u8") as dropped_file,
        write_atomically(cleaning.folder / "held_out.u8") as held_out_file,
        write_atomically(cleaning.folder / REJECTS) as rejects_file,
    ):
        for part, table in enumerate(tables):
            verdict = verdicts[start : start + len(table)]
            start += len(table)
            dropped_file.write(np.ascontiguousarray(table["place"][verdict != KEPT]))
            rejects_file.write(list_part(names, table, verdict, tables.files[part].with_suffix(_REASONS).read_bytes()))
            rows = np.flatnonzero((verdict == KEPT) & table["held"])
            held_out_file.write(np.ascontiguousarray(table["place"][rows]))
            held_out += len(rows)
            held_out_examples += [_example(cleaning, table[row]) for row in rows[: _EXAMPLES - len(held_out_examples)]]
            for number, step_examples in examples.items():
                rows = np.flatnonzero(verdict == number)
                dropped[number] += len(rows)
                step_examples += [_example(cleaning, table[row]) for row in rows[: _EXAMPLES - len(step_examples)]]
    counts = {"documents": total, **{f"dropped by {names[number]}": dropped[number] for number in examples}}
    if isinstance(cleaning.steps[-1].step, HoldOut):
        counts["held out"] = held_out
    found_by_step = {
        names[number] or cleaning.steps[number].name: dict(sorted(each.items(), key=lambda item: (-item[1], item[0])))
        for number, each in enumerate(found)
        if each
    }
    counts |= {f"{step} found {kind}": count for step, kinds in found_by_step.items() for kind, count in kinds.items()}
    counts["kept"] = total - sum(dropped.values()) - held_out
    plan = {
        "key": key,
        "counts": counts,
        "examples": {names[number]: step_examples for number, step_examples in examples.items()},
        "found": found_by_step,
        "held_out": held_out_examples,
        "settings": cleaning.settings,
    }
    _write_json(cleaning.folder / PLAN, plan)


def _step_names(cleaning: Cleaning) -> list[str]:
    """Returns the name of each step that can drop documents, "" for the other steps."""
    names: list[str] = []
    for each in cleaning.steps:
        name = each.name if each.step.drops else ""
        earlier = len([other for other in names if other.split(" #")[0] == name])
        names.append(f"{name} #{earlier + 1}" if name and earlier else name)
    return names


def _example(cleaning: Cleaning, record: np.void) -> str:
    excerpt = bytes(record["excerpt"])
    file, line = cleaning.file_and_line(int(record["place"]))
    text = " ".join(excerpt.decode(errors="ignore").split())
    return f"{file}:{line}: {text}" + ("…" if len(excerpt) >= _EXCERPT_BYTES - 3 else "")
