"""What a tokenizer promises: Transformers loads what it trains, and its fast encoder gives the same ids."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path

import numpy as np

from terakoya.components import Encoded, Tokenizer
from terakoya.contract import settings, toy
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.corpus.corpus import Corpus

LINES = (
    "寺子屋では、子どもたちが読み書きを習った。",
    "朝の光が障子を通して畳の上に落ちる。",
    "隣の席の子は、筆をそっと硯に置いた。",
    "先生は本を開き、ゆっくりと声に出して読む。",
    "みなで声をそろえて、同じ行をくり返した。",
    "夕方になると、町に鐘の音がひびく。",
    "Reading and writing, 12 letters a day; 3,000 by the end.",
    "The pupils read the same line again and again.",
    "ｶﾀｶﾅとＡＢＣ、①②③も文字である。",
    "😀 emoji, é and à are text too.",
)
UNSEEN = ("鯨は海を泳ぐ。", "  two  spaces ", "", "Ωμέγα", "読み書き")


class Subject(settings.Subject):
    """A tokenizer, trained once on a few lines."""

    @cached_property
    def home(self) -> tempfile.TemporaryDirectory[str]:
        """Where all folders of this look are."""
        return tempfile.TemporaryDirectory()

    def close(self) -> None:
        """Removes what was trained."""
        self.home.cleanup()

    @cached_property
    def folder(self) -> Path:
        """Where it was trained; `close` removes it."""
        home = Path(self.home.name)
        assert issubclass(self.component, Tokenizer)
        if self.component.fallback:
            return toy.make_tokenizer(home / "trained")
        return self.train(home / "trained")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """At toy size."""
        found = self.settings()
        assert isinstance(found, Tokenizer)
        return found

    def train(self, folder: Path) -> Path:
        """Trains into `folder`."""
        corpus = folder.with_name(f"{folder.name}.txt")
        corpus.write_text("\n\n".join("\n".join(LINES[n:] + LINES[:n]) for n in range(len(LINES))), encoding="utf-8")
        folder.mkdir()
        self.tokenizer.train(Corpus([corpus]), folder)
        return folder

    @cached_property
    def reader(self) -> Tokenizer:
        """What `from_folder` makes of the trained folder."""
        found = type(self.tokenizer).from_folder(self.folder)
        if found is None:
            raise Wrong("from_folder does not know the folder that train wrote; return the settings that read it")
        if not isinstance(found, type(self.tokenizer)):
            raise Wrong(f"from_folder returned {type(found).__name__}, expected {type(self.tokenizer).__name__}")
        return found


def loads(subject: Subject) -> None:
    """Transformers loads what it trained, offline."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    loaded = subject.tokenizer.load(subject.folder)
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise Wrong(f"load returned {type(loaded).__name__}, expected a Transformers tokenizer")
    try:
        plain = AutoTokenizer.from_pretrained(subject.folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise Wrong(f"AutoTokenizer does not load the folder: {' '.join(str(error).split())[:300]}") from error
    if plain.get_vocab() != loaded.get_vocab():
        raise Wrong("AutoTokenizer finds another vocabulary in the folder than load does")


def recognises(subject: Subject) -> None:
    """It knows its own folder, and no other."""
    assert subject.reader
    with tempfile.TemporaryDirectory() as empty:
        if type(subject.tokenizer).from_folder(Path(empty)) is not None:
            raise Wrong("from_folder takes an empty folder for its own; look for a file that only train writes")
    if subject.tokenizer.fallback:
        return
    with tempfile.TemporaryDirectory() as foreign:
        if type(subject.tokenizer).from_folder(toy.make_tokenizer(Path(foreign) / "words")) is not None:
            raise Wrong("from_folder takes a plain tokenizer.json for its own; look for a file that only train writes")


def same_ids(subject: Subject) -> None:
    """Its fast encoder gives the ids that Transformers gives, line by line."""
    encoder, loaded = subject.reader.encoder(subject.folder), subject.reader.load(subject.folder)
    documents = ["\n".join(LINES), "", *LINES, *UNSEEN]
    encoded = encoder.encode(documents)
    if not isinstance(encoded, Encoded):
        raise Wrong(f"encode returned {type(encoded).__name__}, expected terakoya.components.Encoded")
    lines = [line for document in documents for line in document.split("\n")]
    expected = [loaded(line, add_special_tokens=False)["input_ids"] for line in lines]
    lengths = [len(ids) for ids in expected if len(ids)]
    if len(encoded.document_lines) != len(documents):
        raise Wrong(f"document_lines has {len(encoded.document_lines)} entries for {len(documents)} documents")
    if encoded.line_lengths.tolist() != lengths and not subject.reader.keeps_line_ends:
        raise Wrong("line_lengths are not the lengths of the lines that have tokens")
    start = 0
    for line, ids in zip(lines, expected, strict=True):
        got = encoded.ids[start : start + len(ids)].tolist()
        if got != ids:
            raise Wrong(f"of {line!r} it makes {got[:12]}, Transformers makes {ids[:12]}")
        start += len(ids)
    if start != len(encoded.ids):
        raise Wrong(f"it made {len(encoded.ids)} ids, Transformers {start}")
    if encoded.word_starts is not None and (
        encoded.word_starts.shape != encoded.ids.shape or encoded.word_starts.dtype != np.bool_
    ):
        raise Wrong(
            f"word_starts is {encoded.word_starts.shape} {encoded.word_starts.dtype}, expected {encoded.ids.shape} bool"
        )


def vocabulary(subject: Subject) -> None:
    """Its vocabulary says its size and its special tokens."""
    encoder, loaded = subject.reader.encoder(subject.folder), subject.reader.load(subject.folder)
    size = max(loaded.get_vocab().values()) + 1
    if encoder.vocabulary.size < size:
        raise Wrong(f"vocabulary.size is {encoder.vocabulary.size}, but the largest id is {size - 1}")
    named = {loaded.convert_tokens_to_ids(token) for token in loaded.all_special_tokens}
    missing = sorted(named - set(encoder.vocabulary.special))
    if missing:
        raise Wrong(f"special leaves out {loaded.convert_ids_to_tokens(missing)}: training would mask them like words")


def repeatable(subject: Subject) -> None:
    """Trained again it is the same to the byte, with the same fingerprint."""
    if subject.tokenizer.fallback:
        raise NotLookedAt("it trains nothing")
    with tempfile.TemporaryDirectory() as home:
        again = subject.train(Path(home) / "trained")
        for file in sorted(path for path in subject.folder.rglob("*") if path.is_file()):
            other = again / file.relative_to(subject.folder)
            if not other.is_file() or other.read_bytes() != file.read_bytes():
                raise Wrong(f"{file.name} is another when trained again on the same text")
        facts = subject.reader.fingerprint(subject.folder)
        if not facts or not all(isinstance(value, str) for value in facts.values()):
            raise Wrong(f"fingerprint returned {facts!r}, expected a mapping of name to hash")
        if facts != subject.reader.fingerprint(again):
            raise Wrong("fingerprint of the same tokenizer in another folder is another; leave paths and times out")


CHECKS: tuple[Check, ...] = (loads, recognises, same_ids, vocabulary, repeatable)
