"""A SentencePiece model (https://github.com/google/sentencepiece) in a folder, read as Transformers reads it.

Transformers' `SentencePieceBackend` and the classes that leave it as it is hand text to the model untouched, so their
ids are the model's own; other classes (T5, Llama, Albert, ...) change text or ids on the way and are not read here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
CLASS = "SentencePieceBackend"
FILES = {CLASS: "tokenizer.model", "BertGenerationTokenizer": "spiece.model", "SpeechT5Tokenizer": "spm_char.model"}
"""The classes of Transformers that give the model's own ids, and the file each of them reads."""
RECORD = "terakoya.json"

_CONFIG = "tokenizer_config.json"
_FOREIGN = ("tokenizer.json", "added_tokens.json", "special_tokens_map.json")
_FLAGS = ("lstrip", "rstrip", "single_word")
# What may stand in tokenizer_config.json without a say in which tokens are cut out of text.
_HARMLESS = {
    *("tokenizer_class", "special_tokens_pattern", "model_input_names", "model_max_length", "name_or_path", "backend"),
    *("is_local", "local_files_only", "clean_up_tokenization_spaces", "sp_model_kwargs", "transformers_version"),
    *(f"{role}_token" for role in ROLES),
}
_NAMED = {
    role: re.compile(rf"[\[<]\|?{role}(?:\|[^<>]*|\|?)[\]>]", re.IGNORECASE) for role in ("cls", "sep", "mask", "pad")
}


@dataclass(frozen=True)
class SentencePieceFolder:
    """What ids depend on.

    Attributes:
        model: the model's file.
        config: the content of tokenizer_config.json; empty for a bare model.
        processor: the model, loaded.
        named: "unk", "cls", ... -> piece.
        special: tokens that Transformers cuts out of text before anything else -> id.
        plain: whether searching text from left to right finds them as Transformers does.
    """

    model: Path
    config: Mapping[str, Any]
    processor: SentencePieceProcessor
    named: Mapping[str, str]
    special: Mapping[str, int]
    plain: bool

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The facts that training needs; pieces that no text can become count as special."""
        processor = self.processor
        named = {role: self.special.get(piece, processor.piece_to_id(piece)) for role, piece in self.named.items()}
        return Vocabulary(
            size=max([int(processor.get_piece_size()) - 1, *self.special.values()]) + 1,
            **named,
            special=tuple(sorted({*self.silent, *named.values(), *self.special.values()})),
        )

    @functools.cached_property
    def silent(self) -> Sequence[int]:
        """The pieces that no text can become: control, unknown and unused ones."""
        processor = self.processor
        return [
            id
            for id in range(processor.get_piece_size())
            if processor.is_control(id) or processor.is_unknown(id) or processor.is_unused(id)
        ]


def model_file(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The model in `folder` and its tokenizer_config.json ({} for a bare model), None if it is not such a folder.

    Raises UserError for a broken tokenizer_config.json and where several bare models lie side by side.
    """
    config = folder / _CONFIG
    if not config.is_file():
        if any((folder / name).exists() for name in (*_FOREIGN, "config.json")):
            return None
        bare = sorted(folder.glob("*.model"))
        if len(bare) > 1:
            raise UserError(
                f"{folder}: expected one SentencePiece model, found {', '.join(file.name for file in bare)}; make a "
                f"folder of the one you mean: terakoya tokenizer import {bare[0]} --type sentencepiece --out DIR"
            )
        return (bare[0], {}) if bare and _model(bare[0]) is not None else None
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: expected JSON, got something else: {error}") from error
    if not isinstance(content, dict) or (name := FILES.get(str(content.get("tokenizer_class")))) is None:
        return None
    alters = not content.get("legacy", True) or content.get("normalize") or content.get("sp_model_kwargs")
    file = folder / name
    return (file, content) if not alters and file.is_file() else None


def load_model(file: Path) -> SentencePieceProcessor:
    """The model in `file`. Raises UserError if it is none."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    processor = _model(file)
    if processor is None:
        raise UserError(f"{file}: expected a SentencePiece model, got something else")
    return processor


def _model(file: Path) -> SentencePieceProcessor | None:
    """The model in `file`, None if it is none: other tools end file names in .model too."""
    from sentencepiece import SentencePieceProcessor

    content = file.read_bytes()
    try:
        return SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError:
        return None


def roles_of(processor: SentencePieceProcessor) -> dict[str, str]:
    """Role -> piece: what the model itself names, and pieces with names like [CLS] or <mask>."""
    own = {role: getattr(processor, f"{role}_id")() for role in ("unk", "bos", "eos", "pad")}
    found = {role: str(processor.id_to_piece(id)) for role, id in own.items() if id >= 0}
    for id in range(processor.get_piece_size()):
        piece = str(processor.id_to_piece(id))
        if piece[0] in "<[":
            for role, pattern in _NAMED.items():
                if pattern.fullmatch(piece):
                    found.setdefault(role, piece)
    return {role: found[role] for role in ROLES if role in found}


def read_sentencepiece_folder(folder: Path) -> SentencePieceFolder:
    """Reads `folder`. Transformers itself is asked only where special tokens are other than named pieces of the model.

    Raises UserError if it is not such a folder.
    """
    found = model_file(folder)
    if found is None:
        raise UserError(f"{folder}: expected a SentencePiece model, or {_CONFIG} with one of {', '.join(FILES)}")
    file, config = found
    processor = load_model(file)
    if not config:
        named = roles_of(processor)
    else:
        named = {role: token for role in ROLES if (token := config.get(f"{role}_token")) is not None}
        usual = (
            config.get("tokenizer_class") == CLASS
            and _HARMLESS.issuperset(config)
            and all(isinstance(token, str) and has_piece(processor, token) for token in named.values())
            and not any((folder / name).exists() for name in _FOREIGN)
        )
        if not usual:
            return _read_with_transformers(folder, file, config, processor)
    special = {token: processor.piece_to_id(token) for token in named.values()}
    return SentencePieceFolder(file, config, processor, named, special, _is_plain(special))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer as Transformers loads it; a bare model's with the class that gives the model's own ids."""
    from transformers import AutoTokenizer, SentencePieceBackend

    found = model_file(folder)
    if found is None or found[1]:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    named = roles_of(load_model(found[0]))
    tokens = {f"{role}_token": token for role, token in named.items()}
    return SentencePieceBackend(vocab_file=str(found[0]), special_tokens_pattern="none", **tokens)


def config_of(named: Mapping[str, str], *, cls_sep: bool) -> dict[str, Any]:
    """The tokenizer_config.json of a folder whose tokens are `named`; `cls_sep` says whether `tokenizer(text)` puts
    [CLS] and [SEP] around it."""
    config: dict[str, Any] = {
        "tokenizer_class": CLASS,
        "special_tokens_pattern": "cls_sep" if cls_sep else "none",
        **{f"{role}_token": named.get(role) for role in ROLES},
    }
    if cls_sep:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return config


def has_piece(processor: SentencePieceProcessor, piece: str) -> bool:
    """Whether `piece` is one of the model's."""
    return bool(processor.id_to_piece(processor.piece_to_id(piece)) == piece)


def _is_plain(special: Iterable[str]) -> bool:
    """Whether no two tokens can overlap in a text: none holds another's first character behind its own."""
    first = {token[0] for token in special}
    return not any(first.intersection(token[1:]) for token in special)


def _read_with_transformers(
    folder: Path, file: Path, config: Mapping[str, Any], processor: SentencePieceProcessor
) -> SentencePieceFolder:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    added = tokenizer.added_tokens_decoder
    special = {} if tokenizer.split_special_tokens else {str(token): id for id, token in added.items()}
    named = {role: token for role in ROLES if (token := getattr(tokenizer, f"{role}_token", None)) is not None}
    flags = any(getattr(token, flag) for token in added.values() for flag in _FLAGS)
    return SentencePieceFolder(file, config, processor, named, special, not flags and _is_plain(special))
