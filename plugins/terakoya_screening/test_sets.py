"""Finds text of test sets in documents, by n-grams that both have.

The rule is that of GPT-3 (Brown et al., 2020, appendix C): 13 words in a row without case and punctuation, or a whole
text of 8 to 12 words. Japanese, which has no spaces, has 25 letters in a row for them, or a whole text of 13 to 24: set
phrases of 13 letters are in 3 % of all documents.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from terakoya.errors import UserError, nearest
from terakoya.json_settings import read_value
from terakoya_screening.code_points import letters, ngram_hashes, normalise
from terakoya_screening.word_list import read_lines

logger = logging.getLogger("terakoya")

_JAPANESE_SHARE = 0.2
"""From this share of its letters on, a text of a test set is compared by characters."""
_CHARACTERS, _WORDS = 13, 8
"""The length of the n-grams that are looked up; as many in a row as the rule asks for are a finding."""
_WORD_POWERS = np.random.default_rng(1).integers(0, 2**63, 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class TestSets:
    """The n-grams of test sets. Memory: 10 bytes for each, and a table of 16 to 32 bytes for each, of at most 64 MB."""

    __test__ = False

    def __init__(self, sets: Mapping[str, Iterable[str]], *, characters: int, words: int) -> None:
        self.names, self._by_words = list(sets), False
        grams: list[tuple[np.ndarray, int, int]] = []
        for number, texts in enumerate(sets.values()):
            for text in texts:
                codes = normalise(text)
                kept = codes[letters(codes)]
                japanese = int(np.sum((kept >= 0x3005) & (kept < 0xA000)) + np.sum(kept >= 0x20000))
                by_words = japanese < _JAPANESE_SHARE * len(kept)
                hashes = _word_grams(codes) if by_words else ngram_hashes(kept, _CHARACTERS)
                longest = words - _WORDS + 1 if by_words else characters - _CHARACTERS + 1
                if len(hashes):
                    self._by_words |= by_words
                    grams.append((hashes, number, min(longest, len(hashes))))
        hashes = np.concatenate([np.zeros(0, np.uint64), *(each[0] for each in grams)])
        owners, needs = (
            np.concatenate([np.zeros(0, np.uint8), *(np.full(len(each[0]), each[of], np.uint8) for each in grams)])
            for of in (1, 2)
        )
        order = np.lexsort((needs, hashes))
        self._hashes, first = np.unique(hashes[order], return_index=True)
        self._owners, self._needs = owners[order][first], needs[order][first]
        bits = min(26, max(10, len(self._hashes).bit_length() + 4))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, bool)
        self._table[self._hashes >> self._shift] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, text: str) -> Counter[str]:
        """Returns name of a set -> how many pieces of `text` are in it that are as long as the rule asks for."""
        codes = normalise(text)
        found = self._find(ngram_hashes(codes[letters(codes)], _CHARACTERS))
        return found + self._find(_word_grams(codes)) if self._by_words else found

    def _find(self, hashes: np.ndarray) -> Counter[str]:
        places = self._table.take((hashes >> self._shift).view(np.int64), mode="clip").nonzero()[0]
        numbers = np.minimum(np.searchsorted(self._hashes, hashes[places]), len(self._hashes) - 1)
        is_hit = self._hashes[numbers] == hashes[places]
        places, numbers = places[is_hit], numbers[is_hit]
        found: Counter[str] = Counter()
        for row in np.split(numbers, (np.diff(places) > 1).nonzero()[0] + 1):
            if len(row) and len(row) >= (needs := self._needs[row]).min():
                found[self.names[self._owners[row[needs.argmin()]]]] += 1
        return found


def _word_grams(codes: np.ndarray) -> np.ndarray:
    """Returns the hashes of the n-grams of the words of `codes`, (N,): runs of letters and digits."""
    is_letter = letters(codes)
    begins = is_letter & ~np.concatenate(([False], is_letter[:-1]))
    begins = begins[is_letter]
    starts = begins.nonzero()[0]
    if len(starts) < _WORDS:
        return np.zeros(0, np.uint64)
    places = np.arange(len(begins)) - starts[np.cumsum(begins) - 1]
    values = (codes[is_letter].astype(np.uint64) + np.uint64(1)) * _WORD_POWERS[places % len(_WORD_POWERS)]
    return ngram_hashes(np.add.reduceat(values, starts), _WORDS)


# ------------------------------------------------------------------------------------------------------- their files


def find_sets(
    files: Sequence[Path], tasks: Sequence[str], data: Path | None, *, tell: bool = False
) -> dict[str, list[Path]]:
    """Returns name -> files of a set: of each of `files` by its name, and of each of `tasks`, which are suites such as
    jglue or their tasks, the published evaluation and test sets below the folder `data` or one folder below it.
    `tell` logs which tasks of a suite have no files.

    Raises UserError for an unknown task, without `data`, where files of a task are missing, or of all tasks of a suite.
    """
    sets: dict[str, list[Path]] = {}
    for file in files:
        sets.setdefault(file.name, []).append(file)
    if tasks and (data is None or not data.is_dir()):
        raise UserError(
            f"decontaminate: data: expected the folder with the files of {', '.join(tasks)} as they are published, got "
            f"{data or 'none'}; nothing is downloaded"
        )
    for name in tasks:
        assert data is not None, "checked above"
        found = {task: _find_files(each, data) for task, each in _tasks_of(name).items()}
        missing = [task for task, paths in found.items() if not paths]
        if len(missing) == len(found):
            raise UserError(
                f"decontaminate: {data}: expected {_describe(_tasks_of(name))} (also with .gz, or one folder below), "
                "found no such file; put them there as they are published: nothing is downloaded"
            )
        if missing and tell:
            logger.warning("decontaminate: %s: without %s, whose files are not there", data, ", ".join(missing))
        sets.update({task: paths for task, paths in found.items() if paths})
    return sets


def _quality_rows() -> ModuleType:
    if find_spec("terakoya_quality") is None:
        raise UserError("decontaminate: tasks, and files other than .txt, need the family quality, which is not here")
    from terakoya_quality.finetuning import rows

    return rows


def _suites() -> dict[str, dict[str, Any]]:
    rows = _quality_rows()
    return {file.stem: read_value(file) for file in sorted(Path(str(rows.__file__)).with_name("suites").glob("*.yaml"))}


def _tasks_of(name: str) -> dict[str, Any]:
    suites = _suites()
    tasks = {task: each for suite in suites.values() for task, each in suite["tasks"].items()}
    if name in suites:
        return dict(suites[name]["tasks"])
    if name in tasks:
        return {name: tasks[name]}
    raise UserError(f"decontaminate: tasks: no such suite or task {name}{nearest(name, {*suites, *tasks})}")


def _patterns(task: Mapping[str, Any]) -> list[str]:
    """Returns the patterns of a task's files with examples that a model is measured by, in all forms of the task."""
    layouts = (task, *task.get("layouts", ()))
    return [pattern for each in layouts for part, pattern in each["files"].items() if part != "train"]


def _find_files(task: Mapping[str, Any], data: Path) -> list[Path]:
    patterns = (f"{up}{each}{end}" for each in _patterns(task) for up in ("", "*/") for end in ("", ".gz"))
    return sorted({file for pattern in patterns for file in data.glob(pattern) if file.is_file()})


def _describe(tasks: Mapping[str, Any]) -> str:
    return " or ".join(dict.fromkeys(pattern for task in tasks.values() for pattern in _patterns(task)))


def _read_texts(files: Iterable[Path]) -> Iterator[str]:
    """Yields the texts of examples, in all of their columns; of .txt files, their lines."""
    seen: set[int] = set()
    for file in files:
        is_text = ".txt" in file.suffixes[-2:]
        values = (
            read_lines(file)
            if is_text
            else (value for row in _quality_rows().read_rows(file) for value in _texts(row.values))
        )
        for value in values:
            if hash(value) not in seen:  # contexts of several questions
                seen.add(hash(value))
                yield value


_NO_TEXTS = {"answers", "id"}
"""Columns whose short texts, names and years, are in many documents; answers of SQuAD's form are in its contexts."""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each) if name not in _NO_TEXTS else ()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def read_sets(
    files: tuple[Path, ...], tasks: tuple[str, ...], data: Path | None, *, characters: int, words: int
) -> TestSets:
    """Returns the n-grams of the sets that `find_sets` finds. Raises UserError as it does, and if no text is as long as
    an n-gram."""
    found = find_sets(files, tasks, data)
    sets = TestSets({name: _read_texts(each) for name, each in found.items()}, characters=characters, words=words)
    if not len(sets):
        raise UserError(
            f"decontaminate: {', '.join(map(str, [*files, *tasks]))}: expected a text of {_CHARACTERS} letters or more "
            f"in Japanese, or of {_WORDS} words, found none"
        )
    return sets
