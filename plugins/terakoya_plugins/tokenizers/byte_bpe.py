"""Byte-level BPE as in GPT-2, trained from word counts in parallel; `tokenizers` encodes with it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Tokenizer
from terakoya.components.vocabulary import Vocabulary, planned_vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import byte_level_bpe
from terakoya.toolkit.tokenizers.bpe_merges import warn_of_few_pieces
from terakoya.toolkit.tokenizers.word_counts_file import Splitting, load_or_count_words

if TYPE_CHECKING:
    from terakoya.corpus.corpus import Corpus
    from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

NAME = "byte_bpe"
_SPECIAL_FIELDS = ("eos_token", "bos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class ByteBpe(Tokenizer):
    """Byte-level BPE: pieces are sequences of bytes, so no text is unknown."""

    keeps_line_ends: ClassVar[bool] = True
    test_settings: ClassVar[Mapping[str, Any]] = {"vocab_size": 300}

    vocab_size: int = Field(default=50257, ge=1)
    """Number of pieces, including special tokens and the 256 bytes."""
    min_frequency: int = Field(default=2, ge=1)
    """How often a pair of pieces must occur to be merged."""
    add_prefix_space: bool = False
    """Put a space before each line, so that its first word has the same pieces as elsewhere."""
    eos_token: str = "<|endoftext|>"
    """The token at the end of a text, which is in every vocabulary of this kind."""
    bos_token: str | None = None
    """The token at the beginning of a text; null is none."""
    pad_token: str | None = None
    """The padding token; null is none."""
    unk_token: str | None = None
    """The token of unknown characters; null is none, because every byte has a piece."""
    cls_token: str | None = None
    """The token at the beginning of a row of an encoder; null is none."""
    sep_token: str | None = None
    """The token at the end of a segment of an encoder; null is none."""
    mask_token: str | None = None
    """The token that replaces predicted tokens; null is none."""
    additional_special_tokens: tuple[str, ...] = ()
    """Further special tokens."""
    sample_bytes: int | None = Field(default=None, ge=1)
    """Train on about this much text, evenly taken from the corpus; null is all of it. Unit: bytes."""
    max_words: int = Field(default=2_000_000, ge=1000)
    """Distinct words counted at a time; beyond this the rarest are dropped and the error is reported."""
    counts: Path | None = None
    """A table that `terakoya tokenizer count` has written for the same corpus; null counts now."""

    def splitting(self) -> Splitting:
        """Implements `WordCountTokenizer`: words are split by GPT-2's pattern."""
        return Splitting(
            functools.partial(byte_level_bpe.document_splitter, self.add_prefix_space),
            {
                "words": "byte level",
                "add_prefix_space": str(self.add_prefix_space),
                "tokenizers": importlib.metadata.version("tokenizers"),
            },
            max_words=self.max_words,
            sample_bytes=self.sample_bytes,
        )

    def planned_vocabulary(self) -> Vocabulary:
        pieces = {name.removesuffix("_token"): getattr(self, name) for name in _SPECIAL_FIELDS}
        pieces = {role: piece for role, piece in pieces.items() if piece is not None}
        return planned_vocabulary(self.vocab_size, pieces, self.additional_special_tokens)

    def train(
        self, corpus: Corpus, folder: Path, *, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> Mapping[str, Any]:
        """Implements `Tokenizer.train`. The files are the same for any number of processes."""
        table = load_or_count_words(corpus, self.splitting(), file=self.counts, processes=processes, progress=progress)
        pieces, merges = byte_level_bpe.train_byte_level_bpe(
            table.counts,
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=self._special_tokens(),
        )
        self._save(folder, pieces, merges)
        warn_of_few_pieces(len(pieces), vocab_size=self.vocab_size, min_frequency=self.min_frequency)
        return {"pieces": len(pieces), **table.facts(self.max_words)}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Implements `Tokenizer.from_folder`: reads folders from `train`. `huggingface` reads other GPT-2 folders."""
        record = folder / "terakoya.json"
        if not record.is_file() or not (folder / "tokenizer.json").is_file():
            return None
        content = json.loads(record.read_text(encoding="utf-8"))
        return cls.model_validate(content["settings"]) if content.get("type") == NAME else None

    def encoder(self, folder: Path) -> LineEncoder:
        """Implements `Tokenizer.encoder`. Words are not known: GPT-2's pattern splits Japanese only at punctuation."""
        from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

        return LineEncoder(self.load(folder), parse=self.special_tokens_in_text != "split")

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        files = ("tokenizer.json", "tokenizer_config.json")
        return {
            **{name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
            "tokenizers": importlib.metadata.version("tokenizers"),
        }

    def _special_tokens(self) -> list[str]:
        tokens = [token for name in _SPECIAL_FIELDS if (token := getattr(self, name)) is not None]
        tokens = list(dict.fromkeys([*tokens, *self.additional_special_tokens]))
        if "" in tokens:
            raise UserError(
                f"tokenizer type {NAME}: expected special tokens of at least one character, got an empty one"
            )
        return tokens

    def _save(self, folder: Path, pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as Backend

        vocabulary = {piece: id for id, piece in enumerate(pieces)}
        backend = Backend(models.BPE(vocab=vocabulary, merges=list(merges)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=self.add_prefix_space)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        special = self._special_tokens()
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: token for name in _SPECIAL_FIELDS if (token := getattr(self, name)) is not None},
        }
        record = {"type": NAME, "settings": self.model_dump(mode="json", exclude={"special_tokens_in_text", "counts"})}
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        lines = "".join(f"{left} {right}\n" for left, right in merges)
        texts = {
            "tokenizer_config.json": _json(config),
            "terakoya.json": _json(record),
            # this and merges.txt are for programs that read GPT-2's files
            "vocab.json": json.dumps(vocabulary, ensure_ascii=False),
            "merges.txt": f"#version: 0.2\n{lines}",
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    return {NAME: ByteBpe}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
