"""The tokenizer `example`: every character is a token."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field
from terakoya import hookimpl
from terakoya.components import Encoder, Tokenizer
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Document

if TYPE_CHECKING:  # transformers is imported inside methods, so that the command line stays quick
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
MARK = "example.json"
"""A file that only this kind writes, by which `from_folder` recognises its folders."""


class Example(Tokenizer):
    """Characters. Fields are the options of `terakoya tokenizer train --type example`."""

    vocab_size: int = Field(default=6000, ge=10)
    """Number of ids: the most frequent characters get one, others become [UNK]."""

    def train(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        """Trains on `corpus` and saves a tokenizer that `AutoTokenizer` loads. Returns facts for the record."""
        counts: Counter[str] = Counter()
        for block in corpus.blocks():
            for item in corpus.read(block):
                if isinstance(item, Document):  # anything else is a Reject, with its reason
                    counts.update(item.text)
        ordered = sorted((char for char in counts if not char.isspace()), key=lambda char: (-counts[char], char))
        self._tokenizer(ordered[: self.vocab_size - len(SPECIAL)]).save_pretrained(folder)
        (folder / MARK).write_text(self.model_dump_json(), encoding="utf-8")
        return {"characters": len(ordered)}

    def _tokenizer(self, characters: list[str]) -> PreTrainedTokenizerFast:
        from tokenizers import Regex, Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(WordLevel({piece: id for id, piece in enumerate([*SPECIAL, *characters])}, "[UNK]"))
        tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex("."), "isolated")])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(ROLES, SPECIAL, strict=True)))

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Returns the settings that read `folder`, None if it is not of this kind."""
        file = folder / MARK
        return cls.model_validate_json(file.read_text(encoding="utf-8")) if file.is_file() else None

    def encoder(self, folder: Path) -> Encoder:
        """Returns the fast encoder from documents to ids. This one works for any tokenizer that Transformers loads."""
        from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

        return LineEncoder(self.load(folder), parse=self.special_tokens_in_text != "split")

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        return {"tokenizer": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()}


@hookimpl
def register_tokenizers() -> dict[str, type[Tokenizer]]:
    """Registers `example`: `terakoya tokenizer train --type example`."""
    return {"example": Example}
