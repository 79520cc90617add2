"""A WordPiece tokenizer's folder, read as Transformers reads it: vocab.txt, tokenizer_config.json, special tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.components.tokenizer import load_tokenizer
from terakoya.components.vocabulary import Vocabulary, reserved_ids, sentinel_ids, vocabulary_size
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.sentencepiece_folder import FLAGS, is_plain
from terakoya.toolkit.tokenizers.word_splitters import with_user_dictionaries

NAMES = ("pad", "unk", "cls", "sep", "mask")
_OTHER_FILES = ("added_tokens.json", "special_tokens_map.json", "tokenizer.json")
# Keys of tokenizer_config.json that do not change the special tokens.
_HARMLESS = {
    *("tokenizer_class", "model_max_length", "name_or_path", "transformers_version", "backend", "is_local"),
    *("local_files_only", "clean_up_tokenization_spaces", "added_tokens_decoder", "never_split", "do_lower_case"),
    *("do_word_tokenize", "do_subword_tokenize", "word_tokenizer_type", "subword_tokenizer_type"),
    *("mecab_kwargs", "sudachi_kwargs", "jumanpp_kwargs"),
}


@dataclass(frozen=True)
class BertFolder:
    """The data on which ids depend.

    Attributes:
        config: the content of tokenizer_config.json, with the paths of user dictionaries in the folder.
        pieces: piece -> id, of vocab.txt alone: what words are divided into.
        tokens: piece or added token -> id.
        named: "pad", "unk", "cls", "sep", "mask" -> token.
        special: token that Transformers extracts from text before anything else -> id.
        plain: whether a search from left to right finds these tokens as Transformers does.
    """

    config: Mapping[str, Any]
    pieces: Mapping[str, int]
    tokens: Mapping[str, int]
    named: Mapping[str, str]
    special: Mapping[str, int]
    plain: bool

    @functools.cached_property
    def unknown(self) -> int:
        """The id of the unknown token."""
        return self.tokens[self.named["unk"]]

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The facts that training needs; sentinels and unused slots are special."""
        named = {name: self.tokens[token] for name, token in self.named.items()}
        return Vocabulary(
            size=vocabulary_size(self.tokens.values()),
            **named,
            special=tuple(sorted({*named.values(), *self.special.values()}.union(*reserved_ids(self.tokens)))),
            sentinels=sentinel_ids(self.tokens),
        )


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """Returns the content of the folder's tokenizer_config.json, None if that file or vocab.txt is missing. Raises
    UserError if it is not JSON."""
    file = folder / "tokenizer_config.json"
    if not file.is_file() or not (folder / "vocab.txt").is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: expected JSON, got something else: {error}") from error
    return config if isinstance(config, dict) else None


def read_bert_folder(folder: Path) -> BertFolder:
    """Reads `folder`; through Transformers only where special tokens are not the usual five. Raises UserError if it is
    not a folder of a WordPiece tokenizer."""
    config = read_config(folder)
    if config is None:
        raise UserError(f"{folder}: expected vocab.txt and tokenizer_config.json")
    config = with_user_dictionaries(config, folder)
    named = {name: config.get(f"{name}_token", f"[{name.upper()}]") for name in NAMES}
    pieces = read_vocabulary(folder / "vocab.txt")
    known = _HARMLESS | {f"{name}_token" for name in NAMES}
    usual = (
        known.issuperset(config)
        and all(isinstance(token, str) and token in pieces for token in named.values())
        and all(
            _is_usual(int(id), added, named, pieces) for id, added in config.get("added_tokens_decoder", {}).items()
        )
        and not any((folder / name).exists() for name in _OTHER_FILES)
    )
    if not usual:
        return _read_with_transformers(folder, config)
    special = {token: pieces[token] for token in named.values()}
    return BertFolder(config, pieces, pieces, named, special, is_plain(special))


def read_vocabulary(file: Path) -> dict[str, int]:
    """Returns piece -> id of a vocab.txt; a piece that occurs twice has the last id, as in Transformers."""
    with file.open(encoding="utf-8") as lines:
        return {line.rstrip("\n"): id for id, line in enumerate(lines)}


def _is_usual(id: int, added: Mapping[str, Any], named: Mapping[str, str], pieces: Mapping[str, int]) -> bool:
    """Returns whether an entry of added_tokens_decoder agrees with the vocabulary and has no flags."""
    token = added["content"]
    return token in named.values() and pieces.get(token) == id and not any(added.get(flag) for flag in FLAGS)


def _read_with_transformers(folder: Path, config: Mapping[str, Any]) -> BertFolder:
    tokenizer = load_tokenizer(folder)
    added = tokenizer.added_tokens_decoder
    special = {} if tokenizer.split_special_tokens else {str(token): id for id, token in added.items()}
    named = {name: token for name in NAMES if (token := getattr(tokenizer, f"{name}_token")) is not None}
    tokens = tokenizer.get_vocab()
    if named.get("unk") not in tokens:
        raise UserError(f"{folder}: expected an unknown token that is in the vocabulary, found none")
    flags = any(getattr(token, flag) for token in added.values() for flag in FLAGS)
    pieces = read_vocabulary(folder / "vocab.txt")
    return BertFolder(config, pieces, tokens, named, special, not flags and is_plain(special))
