"""The tokenizer `characters`: every character is a token, including spaces and line ends, as in small models of
plays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from terakoya import hookimpl
from terakoya.components import Encoder, Tokenizer
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Document

UNKNOWN = "[UNK]"
MARK = "characters.json"


class Characters(Tokenizer):
    """The characters of the corpus, in the order of their code points. There are no options."""

    keeps_line_ends: ClassVar[bool] = True

    def train(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        """Collects the characters of the corpus and saves a tokenizer that `AutoTokenizer` loads."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        items = (item for block in corpus.blocks() for item in corpus.read(block))
        found = sorted({char for item in items if isinstance(item, Document) for char in item.text} | {"\n"})
        vocabulary = {char: id for id, char in enumerate([*found, UNKNOWN])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN).save_pretrained(folder)
        (folder / MARK).write_text(self.model_dump_json(), encoding="utf-8")
        return {"characters": len(found)}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Returns the settings that read `folder`, None if it is not of this kind."""
        file = folder / MARK
        return cls.model_validate_json(file.read_text(encoding="utf-8")) if file.is_file() else None

    def encoder(self, folder: Path) -> Encoder:
        """Returns the encoder for any tokenizer of the library `tokenizers`."""
        from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

        return LineEncoder(self.load(folder), parse=self.special_tokens_in_text != "split")

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        """Returns a hash of the file on which ids depend."""
        return {"tokenizer": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()}


@hookimpl
def register_tokenizers() -> dict[str, type[Tokenizer]]:
    """Registers `characters`."""
    return {"characters": Characters}
