"""Japanese WordPiece over MeCab words: Transformers' BertJapaneseTokenizer, trained in parallel and encoded at speed.

Training follows Tohoku University's Japanese BERT (https://github.com/cl-tohoku/bert-japanese): NFKC, MeCab's words,
then BERT's WordPiece, with the same special tokens and unused slots.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Encoded, Tokenizer
from terakoya.data import mecab
from terakoya.data.bert_folder import BertFolder, read_bert_folder, read_config, read_vocabulary
from terakoya.data.corpus import Corpus
from terakoya.data.counts_file import Splitting, counted
from terakoya.data.vocab import Vocabulary
from terakoya.data.word_counts import WordCounts
from terakoya.data.word_table import LINE_END, WordTable
from terakoya.data.wordpiece import PREFIX, WordPiece, bert_words, train_wordpiece

NAME = "mecab_wordpiece"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHUNK_CHARACTERS = 1 << 19

logger = logging.getLogger("terakoya")


class MecabWordPiece(Tokenizer):
    """MeCab's words cut into WordPiece pieces."""

    dictionary: str = "unidic_lite"
    """`ipadic`, `unidic_lite`, `unidic` or the folder of a compiled MeCab dictionary."""
    mecab_option: str = ""
    """Further options for MeCab, such as `-u USER.dic`."""
    vocab_size: int = Field(default=32768, ge=1)
    """Pieces, special tokens and unused slots included."""
    min_frequency: int = Field(default=2, ge=1)
    """How often a pair of pieces must occur to become one."""
    limit_alphabet: int = Field(default=6129, ge=1)
    """Characters that get a piece of their own, the most frequent; others become [UNK]."""
    num_unused_tokens: int = Field(default=10, ge=0)
    """Empty slots [unused0], [unused1], ... for tokens added later."""
    do_lower_case: bool = False
    sample_bytes: int | None = Field(default=None, ge=1)
    """Learn from about so many bytes of text, spread over the corpus. None: from all of it."""
    max_words: int = Field(default=2_000_000, ge=1000)
    """Distinct words counted at a time; beyond that the rarest are dropped and the error is reported."""
    counts: Path | None = None
    """A table that `terakoya tokenizer count` has kept of the same corpus. None: count now."""

    def splitting(self) -> Splitting:
        """See `LearnsFromCounts`: the words that MeCab cuts. Raises UserError for a wrong dictionary or option."""
        options = self._options()
        mecab.splitter(options)  # a wrong dictionary is better seen here than in a worker
        return Splitting(
            functools.partial(mecab.splitter, options),
            {
                "words": "mecab",
                "dictionary": mecab.options_fingerprint(options),
                "mecab_option": self.mecab_option,
                **_versions(),
            },
            max_words=self.max_words,
            sample_bytes=self.sample_bytes,
        )

    def train(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        """See `Tokenizer.train`. The files are the same for any number of processes."""
        table = counted(corpus, self.splitting(), file=self.counts, processes=processes, progress=progress)
        counts: Counter[str] = Counter()
        for word, count in table.counts.items():
            counts[word.lower() if self.do_lower_case else word] += count
        unused = [f"[unused{number}]" for number in range(self.num_unused_tokens)]
        pieces = train_wordpiece(
            bert_words(counts),
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            limit_alphabet=self.limit_alphabet,
            special_tokens=[*SPECIAL_TOKENS, *unused],
        )
        self._save(folder, pieces)
        return self._facts(table, pieces)

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """See `Tokenizer.from_folder`: any BertJapaneseTokenizer with MeCab and WordPiece."""
        config = read_config(folder)
        if config is None or not _is_ours(config):
            return None
        settings: dict[str, Any] = {}
        record = folder / "terakoya.json"
        if record.is_file():
            content = json.loads(record.read_text(encoding="utf-8"))
            if content.get("type") == NAME:
                settings = {name: value for name, value in content["settings"].items() if name in cls.model_fields}
        settings.setdefault("vocab_size", len(read_vocabulary(folder / "vocab.txt")))
        arguments = _mecab_arguments(config)
        dictionary = arguments.get("mecab_dic", "unidic_lite")
        if dictionary is None and "dictionary" not in settings:
            found = mecab.options_folder(arguments.get("mecab_option") or "")
            if found is None:
                return None
            settings["dictionary"] = str(found)
        elif dictionary is not None:
            settings["dictionary"] = dictionary
            settings["mecab_option"] = arguments.get("mecab_option") or ""
        settings["do_lower_case"] = bool(config.get("do_lower_case", False))
        return cls.model_validate(settings)

    def encoder(self, folder: Path) -> MecabWordPieceEncoder:
        """See `Tokenizer.encoder`. The folder's settings hold; only `special_tokens_in_text` is taken from here."""
        bert = read_bert_folder(folder)
        words = mecab.MecabWords(
            _folder_options(bert.config), normalize=_mecab_arguments(bert.config).get("normalize_text", True)
        )
        parse = self.special_tokens_in_text != "split"
        return MecabWordPieceEncoder(bert, words, parse=parse, load=functools.partial(self.load, folder))

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        """See `Tokenizer.fingerprint`."""
        config = read_config(folder) or {}
        tokens = {name: value for name, value in config.items() if name not in ("name_or_path", "model_max_length")}
        return {
            "vocabulary": hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest(),
            "tokenizer_config": hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest(),
            "dictionary": mecab.options_fingerprint(_folder_options(config)),
            **_versions(),
        }

    def _options(self) -> str:
        folder = mecab.dictionary_folder(self.dictionary)
        return f"{mecab.dictionary_options(folder)} {self.mecab_option}".strip()

    def _save(self, folder: Path, pieces: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        named = self.dictionary in mecab.DICTIONARIES
        arguments: dict[str, Any] = {"mecab_dic": self.dictionary if named else None}
        if self.mecab_option or not named:
            arguments["mecab_option"] = self.mecab_option if named else self._options()
        config = {
            "tokenizer_class": "BertJapaneseTokenizer",
            "do_lower_case": self.do_lower_case,
            "word_tokenizer_type": "mecab",
            "subword_tokenizer_type": "wordpiece",
            "mecab_kwargs": arguments,
            **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
        }
        record = {
            "type": NAME,
            "settings": self.model_dump(exclude={"special_tokens_in_text", "counts"}),
            "versions": _versions(),
            "dictionary": mecab.options_fingerprint(self._options()),
        }
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8", newline="\n")
        for name, content in (("tokenizer_config.json", config), ("terakoya.json", record)):
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8", newline="\n")

    def _facts(self, table: WordCounts, pieces: Sequence[str]) -> Mapping[str, Any]:
        if len(pieces) < self.vocab_size:
            logger.warning(
                "vocabulary: %s pieces instead of %s: no other pair of pieces occurs %s times in this corpus",
                f"{len(pieces):,}",
                f"{self.vocab_size:,}",
                self.min_frequency,
            )
        return {"pieces": len(pieces), **table.facts(self.max_words)}


class MecabWordPieceEncoder:
    """Documents to ids; see `Encoder`. A word starts where MeCab starts one; a literal special token is a word."""

    vocabulary: Vocabulary

    def __init__(self, folder: BertFolder, words: mecab.MecabWords, *, parse: bool, load: Callable[[], Any]) -> None:
        """`parse` says whether special tokens in text get their ids; `load` returns Transformers' tokenizer."""
        self.vocabulary = folder.vocabulary
        self._folder, self._words, self._parse = folder, words, parse
        self._load = functools.cache(load)
        special = sorted(folder.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._literal = re.compile(f"({self._special.pattern})")
        self._pieces = WordPiece(folder.pieces, folder.unknown)
        self._lower = bool(folder.config.get("do_lower_case", False))
        self._never_split = {*(folder.config.get("never_split") or ()), *special}
        self._table = WordTable(self._word_ids, self.vocabulary.dtype())

    def encode(self, documents: Sequence[str]) -> Encoded:
        """See `Encoder.encode`."""
        literals: Counter[str] = Counter()
        lines: list[str] = []
        ends = np.zeros(len(documents) + 1, np.int64)
        for number, text in enumerate(documents, 1):
            if self._special.search(text) and (found := self._special.findall(text)):
                literals.update(found)
                lines += map(self._with_literals, text.split("\n")) if self._parse else self._plain(text)
            else:
                lines += self._plain(text)
            ends[number] = len(lines)
        dtype = self.vocabulary.dtype()
        ids, word_starts, lengths = [np.empty(0, dtype)], [np.empty(0, bool)], [np.empty(0, np.int64)]
        for chunk in _chunks(lines):
            chunk_ids, chunk_starts, chunk_lengths = self._table.encode(chunk)
            ids.append(chunk_ids)
            word_starts.append(chunk_starts)
            lengths.append(chunk_lengths)
        every_length = np.concatenate(lengths)
        before = np.concatenate([[0], np.cumsum(every_length > 0)])[ends]
        return Encoded(
            ids=np.concatenate(ids),
            line_lengths=every_length[every_length > 0].astype(np.int32),
            document_lines=np.diff(before).astype(np.int32),
            word_starts=np.concatenate(word_starts),
            literals=dict(literals),
        )

    def _plain(self, text: str) -> list[str]:
        """The words of each line of `text`, taken as it is."""
        return self._words.split(self._words.lines(text))

    def _with_literals(self, line: str) -> str:
        """The words of one line, special tokens as their ids behind a line end: what no word begins with."""
        if not self._folder.plain:
            return self._slow(line)
        words = []
        for index, segment in enumerate(self._literal.split(line)):
            if index % 2:
                words.append(f"{LINE_END}{self._folder.special[segment]}")
            elif segment:
                words += self._plain(segment)
        return " ".join(words)

    def _slow(self, line: str) -> str:
        """As `_with_literals`, by Transformers itself: for special tokens that overlap or strip their neighbours."""
        tokenizer = self._load()
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        words: list[str] = []
        for id, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
            if words and piece.startswith(PREFIX):
                words[-1] += f",{id}"
            else:
                words.append(f"{LINE_END}{id}")
        return " ".join(words)

    def _word_ids(self, word: str) -> list[int]:
        if word.startswith(LINE_END):
            return [int(id) for id in word[1:].split(",")]
        if self._lower and word not in self._never_split:
            word = word.lower()
        return self._pieces.ids(word)


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    """Offers `mecab_wordpiece`."""
    return {NAME: MecabWordPiece}


def _chunks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Words and line ends of all `lines`, some `CHUNK_CHARACTERS` at a time."""
    start = size = 0
    for stop, line in enumerate(lines, 1):
        size += len(line)
        if size >= CHUNK_CHARACTERS or stop == len(lines):
            yield f" {LINE_END} ".join([*lines[start:stop], ""]).rstrip(" ").split(" ")
            start, size = stop, 0


def _is_ours(config: Mapping[str, Any]) -> bool:
    return (
        config.get("tokenizer_class") == "BertJapaneseTokenizer"
        and config.get("word_tokenizer_type") == "mecab"
        and config.get("subword_tokenizer_type", "wordpiece") == "wordpiece"
        and config.get("do_word_tokenize", True)
        and config.get("do_subword_tokenize", True)
    )


def _mecab_arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("mecab_kwargs") or {}


def _folder_options(config: Mapping[str, Any]) -> str:
    """MeCab's options as Transformers' MecabTokenizer makes them from `config`."""
    arguments = _mecab_arguments(config)
    option = arguments.get("mecab_option") or ""
    dictionary = arguments.get("mecab_dic", "unidic_lite")
    if dictionary is None:
        return option
    return f"{mecab.dictionary_options(mecab.dictionary_folder(dictionary))} {option}"


def _versions() -> dict[str, str]:
    """Versions of what ids depend on; NFKC comes with Python."""
    return {"fugashi": importlib.metadata.version("fugashi"), "unicode": unicodedata.unidata_version}
