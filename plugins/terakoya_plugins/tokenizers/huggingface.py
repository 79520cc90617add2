"""Any tokenizer that Transformers' `AutoTokenizer` loads from a folder, unchanged."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from terakoya import hookimpl
from terakoya.components import Tokenizer
from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from terakoya.corpus.corpus import Corpus
    from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

NAME = "huggingface"
_CONFIG = "tokenizer_config.json"
_MAIN_FILES = (_CONFIG, "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "spm.model")
"""A folder without any of these files is not a tokenizer's."""
_FILES = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", *_MAIN_FILES)
_IRRELEVANT_KEYS = ("name_or_path", "model_max_length", "transformers_version", "chat_template")

logger = logging.getLogger("terakoya")


class HuggingFace(Tokenizer):
    """A folder that `AutoTokenizer` loads without network access or code from the folder. It has no settings."""

    fallback: ClassVar[bool] = True
    keeps_line_ends: ClassVar[bool] = True

    def train(
        self, corpus: Corpus, folder: Path, *, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> Mapping[str, Any]:
        raise UserError(
            f"tokenizer type {NAME}: expected a folder that is trained already, got a corpus to train on; train with "
            "another --type, see `terakoya plugins list`"
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Implements `Tokenizer.from_folder`: reads any folder that `AutoTokenizer` can load."""
        if not any((folder / name).is_file() for name in _MAIN_FILES):
            return None
        settings = cls()
        try:
            settings.load(folder)
        except UserError as error:
            logger.warning("%s", error)
            return None
        return settings

    def load(self, folder: Path) -> PreTrainedTokenizerBase:
        """Implements `Tokenizer.load`. Raises UserError with the error message of Transformers."""
        tokenizer = load_tokenizer(folder)
        # Without its files Transformers may return a tokenizer that has only special tokens.
        files = {*type(tokenizer).vocab_files_names.values()}
        if files and tokenizer.is_fast:  # saved as one file, which some classes, such as GPT-2's, do not list
            files.add("tokenizer.json")
        if files and not any((folder / name).is_file() for name in files):
            raise UserError(f"{folder}: expected one of {', '.join(sorted(files))}, found none")
        return tokenizer

    def encoder(self, folder: Path) -> LineEncoder:
        from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

        return LineEncoder(self.load(folder), parse=self.special_tokens_in_text != "split")

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        names = [*type(self.load(folder)).vocab_files_names.values(), *_FILES]
        facts = {}
        for name in sorted({*names} - {_CONFIG}):
            file = folder / name
            if file.is_file():
                facts[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        config_file = folder / _CONFIG
        if config_file.is_file():
            config = json.loads(config_file.read_text(encoding="utf-8"))
            relevant = {name: value for name, value in config.items() if name not in _IRRELEVANT_KEYS}
            facts["tokenizer_config"] = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
        versions = {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")}
        return {**facts, **versions, "unicode": unicodedata.unidata_version}


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    return {NAME: HuggingFace}
