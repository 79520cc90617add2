"""The folder of Transformers' BertJapaneseTokenizer: writing it, and reading settings from it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terakoya.components import vocabulary
from terakoya.components.tokenizer import RECORD, Tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.tokenizers import mecab, word_splitters
from terakoya.toolkit.tokenizers.bert_folder import read_config
from terakoya.toolkit.tokenizers.word_counts_file import Splitting

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def special_tokens(num_unused_tokens: int) -> list[str]:
    """Returns the first tokens of a vocabulary."""
    return [*SPECIAL_TOKENS, *(f"[unused{number}]" for number in range(num_unused_tokens))]


def planned_vocabulary(size: int, num_unused_tokens: int) -> Vocabulary:
    """Returns a vocabulary of `size` ids with these special tokens, for a tokenizer that is not trained yet."""
    roles = {token.strip("[]").lower(): token for token in SPECIAL_TOKENS}
    return vocabulary.planned_vocabulary(size, roles, special_tokens(num_unused_tokens))


def japanese_config(
    words: Mapping[str, Any], *, subword_tokenizer_type: str = "wordpiece", do_lower_case: bool = False
) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json; `words` are its keys for the word splitter."""
    return {
        "tokenizer_class": "BertJapaneseTokenizer",
        "do_lower_case": do_lower_case,
        "word_tokenizer_type": words["word_tokenizer_type"],
        "subword_tokenizer_type": subword_tokenizer_type,
        **{name: value for name, value in words.items() if name != "word_tokenizer_type"},
        **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
    }


def mecab_words(dictionary: str, mecab_option: str) -> dict[str, Any]:
    """Returns the keys of a config for MeCab and a dictionary, by name or folder. Raises UserError if it is missing."""
    named = dictionary in mecab.DICTIONARIES
    options = mecab.dictionary_options(dictionary, mecab_option)
    arguments: dict[str, Any] = {"mecab_dic": dictionary if named else None}
    if mecab_option or not named:
        arguments["mecab_option"] = mecab_option if named else options
    return {"word_tokenizer_type": "mecab", "mecab_kwargs": arguments}


def splitting(config: Mapping[str, Any], *, max_words: int, sample_bytes: int | None) -> Splitting:
    """Returns how words are counted for a tokenizer with this config. Raises UserError for a wrong dictionary or
    option, or if what splits words is not installed."""
    word_splitters.build_splitter(config, special=SPECIAL_TOKENS)  # finds a wrong dictionary here and not in a worker
    return Splitting(
        functools.partial(word_splitters.DocumentSplitter, config, SPECIAL_TOKENS),
        word_splitters.splitter_identity(config),
        max_words=max_words,
        sample_bytes=sample_bytes,
    )


def fingerprint(folder: Path) -> Mapping[str, str]:
    """Returns what determines the ids that the tokenizer in `folder` gives, by name."""
    config = read_config(folder) or {}
    tokens = {name: value for name, value in config.items() if name not in ("name_or_path", "model_max_length")}
    return {
        "vocabulary": hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest(),
        "tokenizer_config": hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest(),
        **word_splitters.splitter_identity(config, folder),
    }


def save_folder(
    folder: Path, pieces: Sequence[str], config: Mapping[str, Any], kind: str, tokenizer: Tokenizer
) -> None:
    """Writes the folder of a `tokenizer` of this `kind`; the same arguments give the same bytes. User dictionaries are
    copied into it, and named so."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = tokenizer.model_dump(exclude={"special_tokens_in_text", "counts"})
    if (option := word_splitters.mecab_arguments(config).get("mecab_option")) is not None:
        option = mecab.copy_user_dictionaries(option, folder)
        config = {**config, "mecab_kwargs": {**config["mecab_kwargs"], "mecab_option": option}}
        settings["mecab_option"] = mecab.copy_user_dictionaries(settings["mecab_option"], folder)
    record = {"type": kind, "settings": settings, "words": word_splitters.splitter_identity(config, folder)}
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8", newline="\n")
    for name, content in (("tokenizer_config.json", config), (RECORD, record)):
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def read_record(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Returns the kind that trained the tokenizer in `folder`, None if it is not recorded, and its settings."""
    file = folder / RECORD
    if not file.is_file():
        return None, {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content.get("type"), content.get("settings", {})


def mecab_settings(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `dictionary` and `mecab_option` from `config`, or from `recorded` where `config` does not have them; None
    if the dictionary is unknown."""
    arguments = word_splitters.mecab_arguments(config)
    dictionary = arguments.get("mecab_dic", "unidic_lite")
    option = arguments.get("mecab_option") or ""
    if dictionary is not None:
        return {"dictionary": dictionary, "mecab_option": option}
    if "dictionary" in recorded:
        return {name: recorded[name] for name in ("dictionary", "mecab_option") if name in recorded}
    found = mecab.options_folder(option)
    return None if found is None else {"dictionary": str(found)}
