"""A SentencePiece model (https://github.com/google/sentencepiece) in a folder, read as Transformers reads it.

Transformers' `SentencePieceBackend`, and the classes that do not change it, pass text to the model unchanged, so their
ids are the model's own. So are those of a tokenizer.json that terakoya has written for the model. Other classes (T5,
Llama, Albert, ...) change text or ids and are not read here.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components import tokenizer as components_tokenizer
from terakoya.components.vocabulary import Vocabulary, reserved_ids, sentinel_ids, vocabulary_size
from terakoya.errors import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("terakoya")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
CLASS = "SentencePieceBackend"
FILES = {CLASS: "tokenizer.model", "BertGenerationTokenizer": "spiece.model", "SpeechT5Tokenizer": "spm_char.model"}
"""The classes of Transformers that return the model's own ids -> the file that each of them reads."""

FAST_CLASS = "PreTrainedTokenizerFast"
"""The class of a folder whose tokenizer.json has the model's ids: the record says that terakoya has written it."""
KIND = "sentencepiece"

_CONFIG = "tokenizer_config.json"
_FOREIGN = ("tokenizer.json", "added_tokens.json", "special_tokens_map.json")
FLAGS = ("lstrip", "rstrip", "single_word")
# Keys of tokenizer_config.json that do not change which tokens are extracted from text.
_HARMLESS = {
    *("tokenizer_class", "special_tokens_pattern", "model_input_names", "model_max_length", "name_or_path", "backend"),
    *("is_local", "local_files_only", "clean_up_tokenization_spaces", "sp_model_kwargs", "transformers_version"),
    *("additional_special_tokens", *(f"{role}_token" for role in ROLES)),
}
_NAMED = {
    role: re.compile(rf"[\[<]\|?{role}(?:\|[^<>]*|\|?)[\]>]", re.IGNORECASE) for role in ("cls", "sep", "mask", "pad")
}


@dataclass(frozen=True)
class SentencePieceFolder:
    """The data on which ids depend.

    Attributes:
        model: the model's file.
        config: the content of tokenizer_config.json; empty for a bare model.
        processor: the model, loaded.
        named: "unk", "cls", ... -> piece.
        special: token that Transformers extracts from text before anything else -> id.
        plain: whether a search from left to right finds these tokens as Transformers does.
    """

    model: Path
    config: Mapping[str, Any]
    processor: SentencePieceProcessor
    named: Mapping[str, str]
    special: Mapping[str, int]
    plain: bool

    @property
    def has_json(self) -> bool:
        """Whether Transformers reads a tokenizer.json with the model's ids."""
        return self.config.get("tokenizer_class") == FAST_CLASS

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The facts that training needs; sentinels, and pieces that no text can become, are special."""
        processor = self.processor
        pieces = {processor.id_to_piece(id): id for id in range(processor.get_piece_size())} | dict(self.special)
        named = {role: self.special.get(piece, processor.piece_to_id(piece)) for role, piece in self.named.items()}
        return Vocabulary(
            size=vocabulary_size([*range(processor.get_piece_size()), *self.special.values()]),
            **named,
            special=tuple(sorted({*self.silent, *named.values(), *self.special.values()}.union(*reserved_ids(pieces)))),
            sentinels=sentinel_ids(pieces),
        )

    @functools.cached_property
    def silent(self) -> Sequence[int]:
        """The ids of pieces that no text can become: control, unknown and unused pieces."""
        processor = self.processor
        return [
            id
            for id in range(processor.get_piece_size())
            if processor.is_control(id) or processor.is_unknown(id) or processor.is_unused(id)
        ]


def model_file(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Returns the model in `folder` and its tokenizer_config.json ({} for a bare model), None if there is no such
    model. Raises UserError for a broken tokenizer_config.json, and for several bare models in one folder."""
    config = folder / _CONFIG
    if not config.is_file():
        if any((folder / name).exists() for name in (*_FOREIGN, "config.json")):
            return None
        bare = sorted(folder.glob("*.model"))
        if len(bare) > 1:
            first = shlex.quote(str(bare[0]))
            raise UserError(
                f"{folder}: expected one SentencePiece model, found {', '.join(file.name for file in bare)}; make a "
                f"folder of the one you mean: terakoya tokenizer import {first} --type sentencepiece --out DIR"
            )
        return (bare[0], {}) if bare and _model(bare[0]) is not None else None
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: expected JSON, got something else: {error}") from error
    if not isinstance(content, dict):
        return None
    name = FILES.get(str(content.get("tokenizer_class")))
    if content.get("tokenizer_class") == FAST_CLASS and _is_recorded(folder):
        name = FILES[CLASS]
    if name is None:
        return None
    alters = not content.get("legacy", True) or content.get("normalize") or content.get("sp_model_kwargs")
    file = folder / name
    return (file, content) if not alters and file.is_file() else None


def _is_recorded(folder: Path) -> bool:
    """Returns whether terakoya has written the folder with the model's tokenizer.json."""
    record = folder / components_tokenizer.RECORD
    if not record.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    content = json.loads(record.read_text(encoding="utf-8"))
    return isinstance(content, dict) and content.get("type") == KIND


def load_model(file: Path) -> SentencePieceProcessor:
    """Returns the model in `file`. Raises UserError if it is not a SentencePiece model."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    processor = _model(file)
    if processor is None:
        raise UserError(f"{file}: expected a SentencePiece model, got something else")
    return processor


def _model(file: Path) -> SentencePieceProcessor | None:
    """Returns the model in `file`, None if it is not one: other tools use the extension .model, too."""
    from sentencepiece import SentencePieceProcessor

    content = file.read_bytes()
    try:
        return SentencePieceProcessor(model_proto=content) if content else None
    except RuntimeError:
        return None


def roles_of(processor: SentencePieceProcessor) -> dict[str, str]:
    """Returns role -> piece: the roles that the model itself names, and pieces with names such as [CLS] or <mask>."""
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
    """Reads `folder`; through Transformers only where special tokens are not named pieces of the model. Raises
    UserError if it is not a folder of a SentencePiece model."""
    found = model_file(folder)
    if found is None:
        raise UserError(f"{folder}: expected a SentencePiece model, or {_CONFIG} with one of {', '.join(FILES)}")
    file, config = found
    processor = load_model(file)
    others: Sequence[str] = ()
    if not config:
        named = roles_of(processor)
    else:
        named = {role: token for role in ROLES if (token := config.get(f"{role}_token")) is not None}
        others = config.get("additional_special_tokens", [])
        usual = (
            config.get("tokenizer_class") in (CLASS, FAST_CLASS)
            and _HARMLESS.issuperset(config)
            and all(isinstance(token, str) and has_piece(processor, token) for token in (*named.values(), *others))
            and not any((folder / name).exists() for name in _FOREIGN[config["tokenizer_class"] == FAST_CLASS :])
        )
        if not usual:
            return _read_with_transformers(folder, file, config, processor)
    special = {token: processor.piece_to_id(token) for token in (*named.values(), *others)}
    return SentencePieceFolder(file, config, processor, named, special, is_plain(special))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Returns the folder's tokenizer, loaded by Transformers; for a bare model, with the class that returns its own
    ids."""
    from transformers import SentencePieceBackend

    found = model_file(folder)
    if found is None or found[1]:
        return components_tokenizer.load_tokenizer(folder)
    named = roles_of(load_model(found[0]))
    tokens = {f"{role}_token": token for role, token in named.items()}
    return SentencePieceBackend(vocab_file=str(found[0]), special_tokens_pattern="none", **tokens)


def config_of(
    processor: SentencePieceProcessor, named: Mapping[str, str], *, cls_sep: bool, fast: bool
) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a folder with the `named` tokens; with `cls_sep`, `tokenizer(text)` adds
    [CLS] and [SEP]. `fast`: the folder has a tokenizer.json, in which all control pieces are special tokens."""
    config: dict[str, Any] = {"tokenizer_class": CLASS, "special_tokens_pattern": "cls_sep" if cls_sep else "none"}
    if fast:
        config = {"tokenizer_class": FAST_CLASS, "model_input_names": ["input_ids", "attention_mask"]}
        controls = [str(processor.id_to_piece(id)) for id in range(len(processor)) if processor.is_control(id)]
        if others := [piece for piece in controls if piece not in named.values()]:
            config["additional_special_tokens"] = others
    config["clean_up_tokenization_spaces"] = False
    config |= {f"{role}_token": named.get(role) for role in ROLES}
    if cls_sep:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return config


def check_decoding(processor: SentencePieceProcessor, tokenizer: Any) -> None:
    """Warns where `tokenizer`, one of Transformers or of `tokenizers`, makes another text of the model's ids than the
    model. An unknown piece is `unk_surface` to the model and a special token to Transformers: no text with one is
    tried."""
    ids = range(len(processor))
    controls = [id for id in ids if processor.is_control(id)]
    odd = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
    words = (str(processor.id_to_piece(id)) for id in ids if not any(test(id) for test in odd))
    word = next((piece for piece in words if piece.isalnum()), "")
    for text in (f"{word}🙂👩\u200d👧𩸽", f"  {word}  {word} ", f"{word} . {word} , {word}", word):
        known = processor.encode(text)
        if any(map(processor.is_unknown, known)):
            continue
        for row in (known, [*controls[-1:], *known, *controls[:1]]):
            expected, got = processor.decode(row), tokenizer.decode(row, skip_special_tokens=True)
            if got != expected:
                logger.warning(
                    "tokenizer: in plain Transformers, ids do not become the text that they have been: %r becomes %r; "
                    "SentencePieceProcessor.decode of the package sentencepiece gives %r",
                    text,
                    got,
                    expected,
                )
                return


def has_piece(processor: SentencePieceProcessor, piece: str) -> bool:
    """Returns whether the model has `piece`."""
    return bool(processor.id_to_piece(processor.piece_to_id(piece)) == piece)


def is_plain(special: Iterable[str]) -> bool:
    """Returns whether no two tokens can overlap in a text: none contains a token's first character after its own
    first."""
    first = {token[0] for token in special}
    return not any(first.intersection(token[1:]) for token in special)


def _read_with_transformers(
    folder: Path, file: Path, config: Mapping[str, Any], processor: SentencePieceProcessor
) -> SentencePieceFolder:
    tokenizer = components_tokenizer.load_tokenizer(folder)
    added = tokenizer.added_tokens_decoder
    special = {} if tokenizer.split_special_tokens else {str(token): id for id, token in added.items()}
    named = {role: token for role in ROLES if (token := getattr(tokenizer, f"{role}_token", None)) is not None}
    flags = any(getattr(token, flag) for token in added.values() for flag in FLAGS)
    return SentencePieceFolder(file, config, processor, named, special, not flags and is_plain(special))
