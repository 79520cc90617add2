"""One pass over a corpus: what is in each block, in any process, and all of it together, in the order of the corpus.

Memory: a block of text in each process, and of the whole corpus only counts of bounded size; see `Survey`. The result
is the same for any number of processes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Block
from terakoya.corpus.files import compression_of, format_of
from terakoya.errors import UserError
from terakoya.process_pool import in_order
from terakoya_corpus.counting import _BINS, DistinctTexts, FrequentKeys, Sampled, count_lengths
from terakoya_corpus.reading import WebDocument, encoding_of, read_block, split_files
from terakoya_corpus.scripts import find_scripts

LENGTHS = (0, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
"""The bounds of the bars of the chart of lengths, in characters."""
LINE_CHARACTERS = (2, 200)
"""The shortest and the longest line that is compared with others."""
LINES, GROUPS, TEXTS = 200_000, 20_000, 200_000
"""How many different lines, sites and texts are counted at a time."""
SAMPLE_CHARACTERS = 16_000_000
CLIPPED_AT = 1_000_000
"""The characters that the sample keeps of a document."""
REJECTS_SHOWN = 3


@dataclass
class FileFacts:
    """What is known of one file. `problem` says why it could not be read to its end."""

    name: str
    format: str
    compression: str
    disk_bytes: int
    encoding: str = ""
    documents: int = 0
    characters: int = 0
    rejected: int = 0
    problem: str = ""


@dataclass(frozen=True)
class BlockFacts:
    """What is in one block: counts, and of each document its hash and its group."""

    characters: int
    lengths: np.ndarray
    fine_lengths: np.ndarray
    longest: tuple[int, int]
    scripts: Counter[str]
    damage: Counter[str]
    lines: Counter[str]
    groups: Counter[str]
    group_characters: Counter[str]
    hashes: list[tuple[int, str]]
    sampled: dict[int, Sampled]
    rejects: list[tuple[str, int, str]]
    rejected: Counter[str]


def measure_block(corpus: Corpus, block: Block, sample_limit: int) -> BlockFacts:
    """Returns what is in `block`; of texts whose hash is below `sample_limit` the beginnings, too."""
    documents, rejects = read_block(corpus, block)
    name = str(block.file)
    texts = [each.text for each in documents]
    hosts = [each.host if isinstance(each, WebDocument) and each.host else name for each in documents]
    hashes = [
        int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        for text in texts
    ]
    sampled: dict[int, Sampled] = {}
    lines: Counter[str] = Counter()
    group_characters: Counter[str] = Counter()
    low, high = LINE_CHARACTERS
    for document, digest, host in zip(documents, hashes, hosts, strict=True):
        group_characters[host] += len(document.text)
        lines.update([line for each in document.text.split("\n") if low <= len(line := each.strip()) <= high])
        if digest < sample_limit and digest not in sampled:
            sampled[digest] = Sampled((name, document.line), document.text[:CLIPPED_AT])
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    scripts, damage = find_scripts(texts)
    bars = np.bincount(np.searchsorted(LENGTHS, lengths, "right"), minlength=len(LENGTHS) + 1)[1:]
    longest = int(np.argmax(lengths)) if len(texts) else -1
    first: list[tuple[str, int, str]] = []
    for reject in rejects:
        if sum(reason == reject.reason for reason, _, _ in first) < REJECTS_SHOWN:
            first.append((reject.reason, reject.line, reject.excerpt))
    return BlockFacts(
        characters=int(lengths.sum()),
        lengths=bars,
        fine_lengths=count_lengths(lengths),
        longest=(int(lengths[longest]), documents[longest].line) if texts else (0, 0),
        scripts=scripts,
        damage=damage,
        lines=lines,
        groups=Counter(hosts),
        group_characters=group_characters,
        hashes=list(zip(hashes, hosts, strict=True)),
        sampled=sampled,
        rejects=first,
        rejected=Counter(each.reason for each in rejects),
    )


@dataclass
class Survey:
    """What is in a corpus. Counted at a time are `LINES` different lines, `GROUPS` sites and `TEXTS` texts, of which
    `SAMPLE_CHARACTERS` characters are kept: however large the corpus is."""

    sample_characters: int = SAMPLE_CHARACTERS
    files: list[FileFacts] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(LENGTHS), np.int64))
    fine_lengths: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    longest: tuple[int, str, int] = (0, "", 0)
    scripts: Counter[str] = field(default_factory=Counter)
    damage: Counter[str] = field(default_factory=Counter)
    lines: FrequentKeys = field(default_factory=lambda: FrequentKeys(LINES))
    groups: FrequentKeys = field(default_factory=lambda: FrequentKeys(GROUPS))
    group_characters: Counter[str] = field(default_factory=Counter)
    rejects: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.texts = DistinctTexts(TEXTS, self.sample_characters)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return sum(each.documents for each in self.files)

    @property
    def characters(self) -> int:
        """The number of characters."""
        return sum(each.characters for each in self.files)

    def add(self, file: FileFacts, found: BlockFacts) -> None:
        """Adds the next block, which is one of `file`."""
        file.documents += len(found.hashes)
        file.characters += found.characters
        file.rejected += found.rejected.total()
        self.lengths += found.lengths
        self.fine_lengths += found.fine_lengths
        if found.longest[0] > self.longest[0]:
            self.longest = (found.longest[0], file.name, found.longest[1])
        self.scripts.update(found.scripts)
        self.damage.update(found.damage)
        self.lines.add(found.lines)
        self.groups.add(found.groups)
        self.group_characters.update(found.group_characters)
        if len(self.group_characters) > 2 * GROUPS:
            self.group_characters = Counter({each: self.group_characters[each] for each in self.groups.counts})
        self.texts.add(found.hashes, found.sampled)
        self.rejected.update(found.rejected)
        for reason, line, excerpt in found.rejects:
            shown = self.rejects.setdefault(reason, [])
            if len(shown) < REJECTS_SHOWN:
                shown.append((file.name, line, excerpt))


def survey_corpus(
    corpus: Corpus,
    *,
    processes: int = 1,
    sample_characters: int = SAMPLE_CHARACTERS,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Reads `corpus`, which has no cleaning, once and returns what is in it.

    A file that is damaged, or lacks its column, is described as far as it can be read. `progress` gets the bytes read
    on disk and their total.

    Raises UserError if no file can be read, if there is no document and no reject, and when a process dies.
    """
    survey = Survey(sample_characters)
    done = 0
    blocks = _blocks(corpus, survey.files)
    calls = (((file, block), (single, block, survey.texts.sample_limit)) for single, file, block in blocks)
    for (file, block), found in in_order(calls, processes, _measurer, task="corpus report"):
        survey.add(file, found)
        done += block.disk_bytes
        if progress is not None:
            progress(done, corpus.total_bytes)
    if not survey.documents and all(each.problem for each in survey.files):
        raise UserError(survey.files[0].problem)
    if not survey.documents and not survey.rejected:
        names = ", ".join(each.name for each in survey.files[:3]) + (", ..." if len(survey.files) > 3 else "")
        raise UserError(f"{names}: expected at least one document, got an empty corpus; give files that hold text")
    return survey


def _measurer() -> Callable[..., BlockFacts]:
    return measure_block


def _blocks(corpus: Corpus, files: list[FileFacts]) -> Iterator[tuple[Corpus, FileFacts, Block]]:
    """Yields the blocks of each file; what is known of it is appended to `files`."""
    for single in split_files(corpus):
        (source,) = single.sources
        file = FileFacts(str(source), str(format_of(source)), compression_of(source) or "", source.stat().st_size)
        files.append(file)
        try:
            file.encoding = encoding_of(source, corpus.encoding)
            for block in single.blocks():
                yield single, file, block
        except UserError as error:
            file.problem = str(error)
