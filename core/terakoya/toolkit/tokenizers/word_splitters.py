"""Word splitters, which run before pieces are looked up: MeCab, Sudachi, Juman++, BERT's basic rules, or white space.

Each is described by keys of the `tokenizer_config.json` of Transformers' BertJapaneseTokenizer, and splits exactly as
that does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import shutil
import subprocess
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import mecab
from terakoya_tokenizer.mecab import mecab_options as options_of
from terakoya_tokenizer.mecab import place_user_dictionaries

SUDACHI_BYTES = 48_000
"""Sudachi accepts at most 49,149 bytes at a time."""
JUMAN_BYTES = 4_096
"""Juman++ accepts at most this many bytes at a time."""
_NFKC_GROWTH = 18  # NFKC replaces a character by at most this many

logger = logging.getLogger("terakoya")


class WordSplitter(Protocol):
    """Splits lines into words; belongs to one process. `stops_at_nul`: whether the rest of a line after a NUL is not
    read, see `unread_text`."""

    stops_at_nul: bool

    def lines(self, text: str) -> list[str]:
        """Returns the lines of `text`, in the form that `split` needs."""

    def split(self, lines: Sequence[str]) -> list[str]:
        """Returns the words of each line, joined by spaces, one string a line. Words may contain other white space."""


class FunctionSplitter:
    """A `WordSplitter` by any function from a line to its words."""

    stops_at_nul = False

    def __init__(self, cut: Callable[[str], Sequence[str]], *, max_bytes: int | None = None) -> None:
        """Lines of more than `max_bytes` are too long for `cut`: they are split into parts, with a warning."""
        self._cut, self._max_bytes = cut, max_bytes

    def lines(self, text: str) -> list[str]:
        return text.split("\n")

    def split(self, lines: Sequence[str]) -> list[str]:
        return [" ".join(self._words(line)) for line in lines]

    def _words(self, line: str) -> Sequence[str]:
        if self._max_bytes is None or len(line) <= self._max_bytes // (4 * _NFKC_GROWTH):
            return self._cut(line)
        normal = unicodedata.normalize("NFKC", line)
        if len(normal.encode()) <= self._max_bytes:
            return self._cut(line)
        size = self._max_bytes // 4
        logger.warning(
            "a line of %s characters is too long for the word splitter: split into parts of %s characters",
            f"{len(line):,}",
            f"{size:,}",
        )
        parts = (normal[start : start + size] for start in range(0, len(normal), size))
        return [word for part in parts for word in self._cut(part)]


def build_splitter(
    config: Mapping[str, Any], *, special: Sequence[str] = (), white_space: bool = False
) -> WordSplitter:
    """Returns the splitter that `config` describes. `basic` keeps `special` tokens in text unchanged. `white_space` is
    for MeCab only: see `MecabSplitter`.

    Only `basic` changes case, and removes accents with it. Raises UserError for a splitter that is not installed.
    """
    kind = splitter_kind(config)
    if kind == "none":
        return FunctionSplitter(str.split)
    if kind == "mecab":
        normalize = mecab_arguments(config).get("normalize_text", True)
        return mecab.build_splitter(mecab_options(config), normalize=normalize, white_space=white_space)
    from transformers.models.bert_japanese import tokenization_bert_japanese as japanese

    never = list(special)
    if kind == "basic":
        basic = japanese.BasicTokenizer(
            do_lower_case=bool(config.get("do_lower_case", False)),
            never_split=config.get("never_split"),
            tokenize_chinese_chars=False,
        )
        return FunctionSplitter(lambda line: basic.tokenize(line, never_split=never))
    _check_installed(kind, config)
    if kind == "sudachi":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Dictionary.create", DeprecationWarning)  # from Transformers
            sudachi = japanese.SudachiTokenizer(**(config.get("sudachi_kwargs") or {}))
        return FunctionSplitter(lambda line: sudachi.tokenize(line), max_bytes=SUDACHI_BYTES)
    juman = japanese.JumanppTokenizer(**(config.get("jumanpp_kwargs") or {}))
    return FunctionSplitter(lambda line: _juman_words(juman, line), max_bytes=JUMAN_BYTES)


def _juman_words(juman: Any, line: str) -> list[str]:
    """Returns the words of `line` from Transformers' JumanppTokenizer. Raises UserError if Juman++ does not answer."""
    text = (unicodedata.normalize("NFKC", line) if juman.normalize_text else line).strip()
    if text.startswith("# "):  # a comment for Juman++, which does not answer: Transformers waits and fails
        return [*_juman_words(juman, "#"), *_juman_words(juman, text[2:])]
    try:
        words: list[str] = juman.tokenize(text)
    except (RuntimeError, TimeoutError) as error:
        raise UserError(
            f"word_tokenizer juman: expected an answer from jumanpp, got none for the line {text[:60]!r}"
            f"{'...' if len(text) > 60 else ''} ({len(text):,} characters): {str(error)[:200]}; check that jumanpp "
            "runs, or remove the line from the corpus"
        ) from error
    return words


class DocumentSplitter:
    """A function from a document to its words, for `word_counts.count_words`."""

    def __init__(self, config: Mapping[str, Any], special: Sequence[str]) -> None:
        """Raises UserError like `build_splitter`."""
        self._words = build_splitter(config, special=special)
        self.stops_at_nul = self._words.stops_at_nul

    def __call__(self, text: str) -> Iterator[str]:
        """Yields the words of `text`."""
        for line in self._words.split(self._words.lines(text)):
            yield from line.split()


def splitter_identity(config: Mapping[str, Any], folder: Path | None = None) -> dict[str, str]:
    """Returns everything on which the words depend, by name: hashes or versions of dictionaries. `folder`: where the
    config is, with user dictionaries in it. Raises UserError like `build_splitter`."""
    kind = splitter_kind(config)
    facts = {"words": kind, "unicode": unicodedata.unidata_version}  # NFKC comes with Python
    if kind == "mecab":
        placed = config if folder is None else with_user_dictionaries(config, folder)
        facts["dictionary"] = mecab.options_fingerprint(mecab_options(placed))
        facts["mecab_option"] = mecab_arguments(config).get("mecab_option") or ""
        facts["normalize_text"] = str(mecab_arguments(config).get("normalize_text", True))
        facts["fugashi"] = importlib.metadata.version("fugashi")
    elif kind == "sudachi":
        _check_installed(kind, config)
        facts["sudachi"] = json.dumps(config.get("sudachi_kwargs") or {}, sort_keys=True)
        facts["sudachipy"] = importlib.metadata.version("sudachipy")
        facts["sudachi dictionary"] = importlib.metadata.version(f"sudachidict_{sudachi_dictionary(config)}")
    elif kind == "jumanpp":
        _check_installed(kind, config)
        facts["jumanpp"] = json.dumps(config.get("jumanpp_kwargs") or {}, sort_keys=True)
        facts["jumanpp version"] = _juman_version()
        facts["rhoknp"] = importlib.metadata.version("rhoknp")
    elif kind == "basic":
        facts["do_lower_case"] = str(bool(config.get("do_lower_case", False)))
        facts["transformers"] = importlib.metadata.version("transformers")
    return facts


def splitter_kind(config: Mapping[str, Any]) -> str:
    """Returns `mecab`, `sudachi`, `jumanpp`, `basic` or `none`."""
    return config.get("word_tokenizer_type", "basic") if config.get("do_word_tokenize", True) else "none"


def mecab_arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments in `config` for Transformers' MecabTokenizer."""
    return config.get("mecab_kwargs") or {}


def with_user_dictionaries(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns the `config` of the tokenizer in `folder` with the paths of the user dictionaries there."""
    arguments = config.get("mecab_kwargs")
    placed = place_user_dictionaries(arguments, folder)
    return config if placed is arguments else {**config, "mecab_kwargs": placed}


def mecab_options(config: Mapping[str, Any]) -> str:
    """Returns MeCab's options, as Transformers' MecabTokenizer derives them from `config`."""
    return options_of(mecab_arguments(config), mecab.dictionary_folder)


def user_dictionaries(config: Mapping[str, Any]) -> list[str]:
    """Returns the files of MeCab's user dictionaries that `config` names."""
    return mecab.user_dictionaries(mecab_arguments(config).get("mecab_option") or "")


def sudachi_dictionary(config: Mapping[str, Any]) -> str:
    """Returns `small`, `core` or `full`."""
    return (config.get("sudachi_kwargs") or {}).get("sudachi_dict_type", "core")


def _juman_version() -> str:
    """Returns the version of jumanpp and its dictionary."""
    result = subprocess.run(["jumanpp", "--version"], capture_output=True, text=True, encoding="utf-8", check=False)
    if result.returncode:
        raise UserError(
            f"word_tokenizer juman: expected its version from `jumanpp --version`, got status {result.returncode}: "
            f"{result.stderr.strip()[:200]}; check that jumanpp runs"
        )
    return result.stdout.strip()


def _check_installed(kind: str, config: Mapping[str, Any]) -> None:
    if kind == "sudachi":
        dictionary = f"sudachidict_{sudachi_dictionary(config)}"
        for module in ("sudachipy", dictionary):
            if importlib.util.find_spec(module) is None:
                raise UserError(
                    f"word_tokenizer sudachi: {module} is not installed; run: pip install sudachipy {dictionary}"
                )
    elif kind == "jumanpp":
        if importlib.util.find_spec("rhoknp") is None:
            raise UserError("word_tokenizer juman: rhoknp is not installed; run: pip install rhoknp")
        if shutil.which("jumanpp") is None:
            raise UserError(
                "word_tokenizer juman: the program jumanpp is not installed; see https://github.com/ku-nlp/jumanpp"
            )
    else:
        raise UserError(f"word_tokenizer_type: expected mecab, sudachi, jumanpp or basic, got {kind!r}")
