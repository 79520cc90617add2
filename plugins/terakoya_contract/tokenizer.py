"""Checks of a tokenizer: Transformers loads the folder that it trains, and its fast encoder gives the same ids."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path

import numpy as np

from terakoya.components import EncodedDocuments, Tokenizer
from terakoya.components.tokenizer import load_tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya_contract import settings, toy
from terakoya_contract.results import Check, CheckFailed, CheckSkipped

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


class TokenizerCase(settings.Case):
    """A tokenizer, trained once on a few lines."""

    @cached_property
    def home(self) -> tempfile.TemporaryDirectory[str]:
        """The temporary folder of this case."""
        return tempfile.TemporaryDirectory()

    def close(self) -> None:
        """Removes the trained tokenizer."""
        self.home.cleanup()

    @cached_property
    def folder(self) -> Path:
        """The folder of the trained tokenizer; `close` removes it."""
        home = Path(self.home.name)
        assert issubclass(self.component, Tokenizer)
        if self.component.fallback:
            return toy.make_tokenizer(home / "trained")
        return self.train(home / "trained")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.settings_of(Tokenizer)

    def train(self, folder: Path) -> Path:
        """Trains on LINES, writes into the new `folder` and returns it."""
        corpus = folder.with_name(f"{folder.name}.txt")
        corpus.write_text("\n\n".join("\n".join(LINES[n:] + LINES[:n]) for n in range(len(LINES))), encoding="utf-8")
        folder.mkdir()
        self.tokenizer.train(Corpus([corpus]), folder)
        return folder

    @cached_property
    def reader(self) -> Tokenizer:
        """The tokenizer that `from_folder` returns for the trained folder."""
        reader = type(self.tokenizer).from_folder(self.folder)
        if reader is None:
            raise CheckFailed("from_folder does not recognise the folder that train wrote; return settings for it")
        if not isinstance(reader, type(self.tokenizer)):
            raise CheckFailed(f"from_folder returned {type(reader).__name__}, expected {type(self.tokenizer).__name__}")
        return reader


def check_loading(case: TokenizerCase) -> None:
    """Transformers loads the trained folder, offline."""
    from transformers import PreTrainedTokenizerBase

    loaded = case.tokenizer.load(case.folder)
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise CheckFailed(f"load returned {type(loaded).__name__}, expected a Transformers tokenizer")
    try:
        plain = load_tokenizer(case.folder)
    except UserError as error:
        raise CheckFailed(f"AutoTokenizer does not load the folder: {error}") from error
    if plain.get_vocab() != loaded.get_vocab():
        raise CheckFailed("AutoTokenizer finds another vocabulary in the folder than load does")


def check_recognition(case: TokenizerCase) -> None:
    """It recognises its own folder, and no other."""
    assert case.reader
    with tempfile.TemporaryDirectory() as empty:
        if type(case.tokenizer).from_folder(Path(empty)) is not None:
            raise CheckFailed("from_folder accepts an empty folder; look for a file that only train writes")
    if case.tokenizer.fallback:
        return
    with tempfile.TemporaryDirectory() as foreign:
        if type(case.tokenizer).from_folder(toy.make_tokenizer(Path(foreign) / "words")) is not None:
            raise CheckFailed("from_folder accepts a plain tokenizer.json; look for a file that only train writes")


def check_ids(case: TokenizerCase) -> None:
    """Its fast encoder gives the same ids as Transformers, line by line."""
    encoder, loaded = case.reader.encoder(case.folder), case.reader.load(case.folder)
    documents = ["\n".join(LINES), "", *LINES, *UNSEEN]
    encoded = encoder.encode(documents)
    if not isinstance(encoded, EncodedDocuments):
        raise CheckFailed(f"encode returned {type(encoded).__name__}, expected terakoya.components.EncodedDocuments")
    lines = [line for document in documents for line in document.split("\n")]
    expected = [loaded(line, add_special_tokens=False)["input_ids"] for line in lines]
    lengths = [len(ids) for ids in expected if len(ids)]
    if len(encoded.document_lines) != len(documents):
        raise CheckFailed(f"document_lines has {len(encoded.document_lines)} entries for {len(documents)} documents")
    if encoded.line_lengths.tolist() != lengths and not case.reader.keeps_line_ends:
        raise CheckFailed("line_lengths are not the lengths of the lines that have tokens")
    start = 0
    for line, ids in zip(lines, expected, strict=True):
        got = encoded.ids[start : start + len(ids)].tolist()
        if got != ids:
            raise CheckFailed(f"for {line!r} its ids are {got[:12]}, those of Transformers {ids[:12]}")
        start += len(ids)
    if start != len(encoded.ids):
        raise CheckFailed(f"it returned {len(encoded.ids)} ids, Transformers {start}")
    if encoded.word_starts is not None and (
        encoded.word_starts.shape != encoded.ids.shape or encoded.word_starts.dtype != np.bool_
    ):
        raise CheckFailed(
            f"word_starts is {encoded.word_starts.shape} {encoded.word_starts.dtype}, expected {encoded.ids.shape} bool"
        )


def check_vocabulary(case: TokenizerCase) -> None:
    """Its vocabulary has the right size and every special token."""
    encoder, loaded = case.reader.encoder(case.folder), case.reader.load(case.folder)
    size = max(loaded.get_vocab().values()) + 1
    if encoder.vocabulary.size < size:
        raise CheckFailed(f"vocabulary.size is {encoder.vocabulary.size}, but the largest id is {size - 1}")
    named = {loaded.convert_tokens_to_ids(token) for token in loaded.all_special_tokens}
    missing = sorted(named - set(encoder.vocabulary.special))
    if missing:
        raise CheckFailed(
            f"vocabulary.special lacks {loaded.convert_ids_to_tokens(missing)}: training would mask them like words"
        )
    planned = None if case.tokenizer.fallback else case.tokenizer.planned_vocabulary()
    if planned is not None and _special_roles(planned) != _special_roles(encoder.vocabulary):
        raise CheckFailed(
            f"planned_vocabulary has {_special_roles(planned)}, the trained vocabulary "
            f"{_special_roles(encoder.vocabulary)}"
        )


def _special_roles(vocabulary: Vocabulary) -> tuple[list[str], int]:
    """The roles of `vocabulary` that have a token, and the number of its special ids."""
    roles = [role for role, id in vocabulary if role not in ("size", "special", "sentinels") and id is not None]
    return roles, len(vocabulary.special)


def check_reproducibility(case: TokenizerCase) -> None:
    """Trained twice on the same text it gives the same bytes and the same fingerprint."""
    if case.tokenizer.fallback:
        raise CheckSkipped("it is not trained")
    with tempfile.TemporaryDirectory() as home:
        second = case.train(Path(home) / "trained")
        for file in sorted(path for path in case.folder.rglob("*") if path.is_file()):
            other = second / file.relative_to(case.folder)
            if not other.is_file() or other.read_bytes() != file.read_bytes():
                raise CheckFailed(f"{file.name} differs when trained again on the same text")
        facts = case.reader.fingerprint(case.folder)
        if not facts or not all(isinstance(value, str) for value in facts.values()):
            raise CheckFailed(f"fingerprint returned {facts!r}, expected a mapping of name to hash")
        if facts != case.reader.fingerprint(second):
            raise CheckFailed("fingerprint changes with the folder of the same tokenizer; leave out paths and times")


CHECKS: tuple[Check, ...] = (check_loading, check_recognition, check_ids, check_vocabulary, check_reproducibility)
