"""The leaderboard's text and tests, the same for everyone: made from repositories at fixed commits.

The text is novels and essays of Aozora Bunko and the articles of Wikipedia about Kyoto, a document a line. Documents
with a sentence of the tests are left out. What may be done with the text is said where it is published: most of Aozora
Bunko is in the public domain in Japan, Wikipedia is under CC BY-SA.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_input" / "programs"))

import entities


@dataclass(frozen=True)
class Repository:
    """A repository on GitHub at one commit."""

    name: str
    commit: str


AOZORA = Repository("aozorahack/aozorabunko_text", "0984f7dc18a2270bdfd2ff99bf14fd1b3ebb4f65")
KYOTO = Repository("venali/BilingualCorpus", "e5fcb65f2101efa7ab05ade551d97f6c5af6db7b")
JGLUE = Repository("yahoojapan/JGLUE", "6f071c09316baae89c3d083a90985b4b1cb9968c")
GSD = Repository("UniversalDependencies/UD_Japanese-GSD", "7bc20119f476b552635e0640644e577b6fd3606b")
AOZORA_BYTES = 60_000_000
LEAST_CHARACTERS = 200
"""Of a document."""
LEAST_SENTENCE = 20
"""Characters from which on a sentence of a test tells that a document is its source."""
TEXT_SHA256 = "c67bd1a1ddbaf3f0cd2499cf259f211ff9c42e0b0723aebb94059dccf1529638"
OLD_KANA = re.compile("[ゐゑヰヱ]")
GAIJI = re.compile(r"※［＃[^］]*?(?:第[34]水準)?(\d)-(\d{1,2})-(\d{1,2})[^］]*］")


def make(repositories: Path, work: Path) -> str:
    """Writes `text.jsonl` and the tests' sets below `work` from clones at `repositories`/owner/name.

    Returns:
        The text's SHA-256, in hexadecimal.
    """
    write_tests(repositories, work / "data")
    tested = {part for path in (work / "data").rglob("*.jsonl") for part in sentences(path.read_text(encoding="utf-8"))}
    seen: set[str] = set()
    documents: list[tuple[str, str]] = []
    for repository, pattern, clean, limit in (
        (AOZORA, re.compile(r"cards/.*\.txt"), clean_novel, AOZORA_BYTES),
        (KYOTO, re.compile(r"wiki_corpus_2\.01/.*\.xml"), clean_article, sys.maxsize),
    ):
        size = 0
        for key, content in files(repositories, repository, pattern):
            text = clean(content)
            if text is None or text[:LEAST_CHARACTERS] in seen or tested & set(sentences(text)):
                continue
            size += len(text.encode())
            if size > limit:
                break
            seen.add(text[:LEAST_CHARACTERS])
            documents.append((key, text))
    whole = hashlib.sha256()
    with (work / "text.jsonl").open("wb") as out:
        for _, text in sorted(documents):
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            whole.update(line)
            out.write(line)
    return whole.hexdigest()


def files(repositories: Path, repository: Repository, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """Yields (hash of the path, content) of the repository's files, in the order of the hashes."""
    git = ["git", "-C", str(repositories / repository.name)]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", repository.commit], check=True, capture_output=True).stdout
    entries = [line.split("\t", 1) for line in listed.decode().split("\0") if line]
    found = [(facts.split()[2], path) for facts, path in entries if pattern.fullmatch(path)]
    found.sort(key=lambda each: _hash(each[1]))
    with subprocess.Popen([*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin and program.stdout
        for name, path in found:
            program.stdin.write(name.encode() + b"\n")
            program.stdin.flush()
            size = int(program.stdout.readline().split()[2])
            yield _hash(path), program.stdout.read(size + 1)[:-1]
        program.stdin.close()


def clean_novel(content: bytes) -> str | None:
    """Returns the text of a file of Aozora Bunko without its header, its notes and readings; None where it is short, in
    old spelling or not in Shift_JIS."""
    try:
        text = content.decode("cp932").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    header = re.split(r"^-{20,}$", text, maxsplit=2, flags=re.MULTILINE)
    body = header[2] if len(header) == 3 else text.partition("\n\n")[2]
    body = body.rpartition("\n底本：")[0] or body
    body = GAIJI.sub(_character, body)
    body = re.sub(r"※?［＃[^］]*］|《[^》]*》|[｜|]", "", body)
    lines = [line.strip() for line in body.split("\n")]
    joined = "\n".join(line for line in lines if line)
    old = len(OLD_KANA.findall(joined)) * 5000 > len(joined)
    return None if old or len(joined) < LEAST_CHARACTERS else joined


def _character(note: re.Match[str]) -> str:
    """Returns the character that a note names by its place in JIS X 0213."""
    plane, row, cell = (int(each) for each in note.groups())
    try:
        return (b"\x8f" * (plane == 2) + bytes([0xA0 + row, 0xA0 + cell])).decode("euc_jis_2004")
    except (UnicodeDecodeError, ValueError):
        return "〓"


def clean_article(content: bytes) -> str | None:
    """Returns the Japanese of an article with translations, a paragraph a line; None where it is short or not XML."""
    try:
        article = ElementTree.fromstring(content)
    except ElementTree.ParseError:
        return None
    lines = []
    for part in article.iter():
        if part.tag in ("tit", "par"):
            lines.append("".join(each.text or "" for each in part.iter("j")).strip())
    joined = "\n".join(line for line in lines if line)
    return None if len(joined) < LEAST_CHARACTERS else joined


def sentences(text: str) -> list[str]:
    """Returns the sentences of `text` that are long enough to be told from stock phrases."""
    return [part for part in re.split('[。\n"]', text) if len(part) >= LEAST_SENTENCE]


def write_tests(repositories: Path, data: Path) -> None:
    """Writes train.jsonl, eval.jsonl and test.jsonl of each task. What is published without a set to choose settings
    on is divided by a hash, four to one: JNLI by the image that both sentences tell of, as its published sets are."""
    jglue = functools.partial(_lines, repositories, JGLUE)
    for task in ("jsts", "jcommonsenseqa"):
        for name, published in (("train", "train"), ("eval", "valid"), ("test", "test")):
            _write(data / task / f"{name}.jsonl", jglue(rf"datasets/{task}-v[\d.]+/{published}-v[\d.]+\.json"))
    pairs = jglue(r"datasets/jnli-v[\d.]+/valid-v[\d.]+\.json")
    _divide(data / "jnli", pairs, by=[json.loads(line)["yjcaptions_id"].partition("-")[0] for line in pairs])
    _write(data / "jnli/test.jsonl", jglue(r"datasets/jnli-v[\d.]+/test-v[\d.]+\.json"))
    sentences = _names(repositories, data, "dev")
    _divide(data / "names", sentences, by=sentences)
    _write(data / "names/test.jsonl", _names(repositories, data, "test"))


def _lines(repositories: Path, repository: Repository, pattern: str) -> list[str]:
    (_, content), *others = files(repositories, repository, re.compile(pattern))
    assert not others, pattern
    return content.decode().splitlines()


def _names(repositories: Path, data: Path, name: str) -> list[str]:
    """Returns the runs of proper nouns in a set of UD Japanese GSD as examples."""
    copy = data / "names" / f"{name}.conllu"
    _write(copy, _lines(repositories, GSD, rf"ja_gsd-ud-{name}\.conllu"))
    return list(entities.examples(copy))


def _divide(folder: Path, lines: Sequence[str], *, by: Sequence[str]) -> None:
    chosen = [int(_hash(each), 16) % 5 == 0 for each in by]
    for name, wanted in (("eval", True), ("train", False)):
        _write(folder / f"{name}.jsonl", [line for line, each in zip(lines, chosen, strict=True) if each == wanted])


def _write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
