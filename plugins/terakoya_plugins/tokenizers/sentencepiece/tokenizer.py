"""SentencePiece (https://github.com/google/sentencepiece): unigram, BPE and character models, trained from documents.

The options are those of its trainer, with the same names and defaults. `pretokenization_delimiter` keeps pieces inside
MeCab's words during training.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from terakoya import hookimpl
from terakoya.components import Tokenizer
from terakoya.components.tokenizer import RECORD
from terakoya.components.vocabulary import Vocabulary, planned_vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import mecab, sentencepiece_folder
from terakoya.toolkit.tokenizers.sentencepiece_folder import CLASS, FILES, ROLES
from terakoya_plugins.tokenizers.sentencepiece.encoder import SentencePieceEncoder
from terakoya_plugins.tokenizers.sentencepiece.tokenizer_json import (
    NotConvertibleError,
    adds_up,
    build_backend,
    round_scores,
)
from terakoya_plugins.tokenizers.sentencepiece.trainer import LONGEST_LINE, TrainingLines, train_model
from terakoya_plugins.tokenizers.sentencepiece.words import WordBounds

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

NAME = "sentencepiece"
Symbols = Annotated[tuple[str, ...], Field(strict=False)]
Id = Annotated[int, Field(ge=-1)]

logger = logging.getLogger("terakoya")


class SentencePiece(Tokenizer):
    """A SentencePiece model with the library's own ids."""

    model_config = ConfigDict(strict=True)
    keeps_line_ends: ClassVar[bool] = True
    test_settings: ClassVar[Mapping[str, Any]] = {"vocab_size": 120}

    model_type: Literal["unigram", "bpe", "char"] = "unigram"
    """The algorithm: a unigram language model, byte-pair merges, or single characters."""
    vocab_size: int = Field(default=8000, ge=1)
    """Total number of pieces."""
    character_coverage: float = Field(default=0.9995, ge=0.98, le=1)
    """The share of the text's characters that get a piece; others are unknown, or bytes with `byte_fallback`."""
    byte_fallback: bool = False
    """Whether characters without a piece become their UTF-8 bytes."""
    split_digits: bool = False
    """Whether each digit is a piece of its own."""
    split_by_number: bool = True
    """Whether pieces end between digits and other characters."""
    split_by_unicode_script: bool = True
    """Whether pieces end between scripts, such as kanji and Latin."""
    split_by_whitespace: bool = True
    """Whether pieces end at spaces."""
    treat_whitespace_as_suffix: bool = False
    """Whether the mark of a space is at the end of a piece instead of its start."""
    allow_whitespace_only_pieces: bool = False
    """Whether pieces may consist of spaces only."""
    pretokenization_delimiter: str = ""
    """Inserted between MeCab's words during training, for example "||||", so that no piece spans words. Word starts are
    then known, which allows whole-word masking. Empty: MeCab is not used."""
    dictionary: str = "unidic_lite"
    """With `pretokenization_delimiter`: `ipadic`, `unidic_lite`, `unidic` or a compiled MeCab dictionary's folder."""
    mecab_option: str = ""
    """With `pretokenization_delimiter`: further options for MeCab, such as `-u USER.dic`."""
    normalization_rule_name: Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"] = "nmt_nfkc"
    """The normalisation of text: Unicode's NFKC, with NMT's treatment of spaces (`nmt_`), with case folding (`_cf`), or
    none (`identity`)."""
    normalization_rule_tsv: str = ""
    """A file of rules that replace `normalization_rule_name`."""
    add_dummy_prefix: bool | None = None
    """Whether to put a space before each text. Null is yes for `gpt`, no for `bert`, because Transformers would also
    put one after each [MASK], where training never has one."""
    remove_extra_whitespaces: bool = True
    """Whether spaces at the ends, and repeated ones, are removed."""
    escape_whitespaces: bool = True
    """Whether spaces become the mark `▁`."""
    user_defined_symbols: Symbols = ()
    """Strings that are always one piece; a list, or separated by commas."""
    control_symbols: Symbols = ()
    """Pieces that text never contains."""
    required_chars: str = ""
    """Characters that get a piece whatever `character_coverage` says."""
    special_tokens: Literal["gpt", "bert"] = "gpt"
    """`gpt`: <unk>, <s>, </s> at 0, 1, 2. `bert`: [PAD], [UNK], [CLS], [SEP] at 0 to 3, and [MASK]; `tokenizer(text)`
    gives [CLS] text [SEP]. The eight keys below change names and ids; an id of -1 leaves a piece out."""
    unk_id: int | None = Field(default=None, ge=0)
    """The id of the unknown piece; null is the one of `special_tokens`."""
    bos_id: Id | None = None
    """The id of the piece at the beginning of a text; null is the one of `special_tokens`."""
    eos_id: Id | None = None
    """The id of the piece at the end of a text; null is the one of `special_tokens`."""
    pad_id: Id | None = None
    """The id of the padding piece; null is the one of `special_tokens`."""
    unk_piece: str | None = Field(default=None, min_length=1)
    """The unknown piece; null is the one of `special_tokens`."""
    bos_piece: str | None = Field(default=None, min_length=1)
    """The piece at the beginning of a text; null is the one of `special_tokens`."""
    eos_piece: str | None = Field(default=None, min_length=1)
    """The piece at the end of a text; null is the one of `special_tokens`."""
    pad_piece: str | None = Field(default=None, min_length=1)
    """The padding piece; null is the one of `special_tokens`."""
    cls_piece: str | None = Field(default=None, min_length=1)
    """The piece used as [CLS]; added if it is not among the symbols; null is the one of `special_tokens`."""
    sep_piece: str | None = Field(default=None, min_length=1)
    """The piece used as [SEP]; added if it is not among the symbols; null is the one of `special_tokens`."""
    mask_piece: str | None = Field(default=None, min_length=1)
    """The piece used as [MASK]; added if it is not among the symbols; null is the one of `special_tokens`."""
    unk_surface: str = " ⁇ "
    """The text of an unknown piece when ids become text again."""
    input_sentence_size: int = Field(default=0, ge=0)
    """Train on this many lines: a sample with `shuffle_input_sentence`, otherwise the first ones; 0 is all lines. Unit:
    lines."""
    shuffle_input_sentence: bool = True
    """Whether `input_sentence_size` lines are a random sample, instead of the first ones."""
    random_seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the sample of lines."""
    max_sentence_length: int = Field(default=4192, ge=10, le=1 << 30)
    """Longer lines are left out of training and counted. Unit: bytes."""
    num_threads: int = Field(default=16, ge=1, le=1024)
    """Threads of the trainer; the same number gives the same bytes."""
    train_extremely_large_corpus: bool = False
    """Whether the trainer of unigram models uses 64-bit indices, for corpora above 4 GB of text."""
    seed_sentencepiece_size: int = Field(default=1_000_000, ge=1)
    """Number of pieces that a unigram model starts with, before it removes the least useful ones."""
    seed_sentencepieces_file: str = ""
    """A file of pieces that a unigram model starts with; empty computes them."""
    shrinking_factor: float = Field(default=0.75, gt=0, lt=1)
    """The share of pieces that a unigram model keeps in each round."""
    num_sub_iterations: int = Field(default=2, ge=1)
    """Iterations of expectation-maximisation in each round of a unigram model."""
    max_sentencepiece_length: int = Field(default=16, ge=1)
    """The longest piece. Unit: characters."""
    hard_vocab_limit: bool = True
    """Whether `vocab_size` is met exactly; otherwise it is an upper bound."""
    use_all_vocab: bool = False
    """For `char`: whether every character of the text becomes a piece, whatever `vocab_size` says."""

    @field_validator("user_defined_symbols", "control_symbols", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return next(csv.reader([value]), []) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        fields = type(self).model_fields
        if not self.pretokenization_delimiter:
            changed = [key for key in ("dictionary", "mecab_option") if getattr(self, key) != fields[key].default]
            for key in changed:
                raise ValueError(f'{key}: MeCab is used only with pretokenization_delimiter, for example "||||"')
        ids = [id for id in (self._id(role) for role in ("unk", "bos", "eos", "pad")) if id >= 0]
        if len(set(ids)) < len(ids):
            raise ValueError(f"unk_id, bos_id, eos_id, pad_id: expected four different ids (-1: none), got {ids}")
        return self

    def planned_vocabulary(self) -> Vocabulary:
        absent = {role for role in ("unk", "bos", "eos", "pad") if self._id(role) < 0}
        pieces = {role: str(self._piece(role)) for role in self._roles() if role not in absent and self._piece(role)}
        return planned_vocabulary(self.vocab_size, pieces, self.control_symbols)

    def train(
        self, corpus: Corpus, folder: Path, *, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> Mapping[str, Any]:
        """Implements `Tokenizer.train`. The trainer uses `num_threads`, not `processes`."""
        uses_delimiter = bool(self.pretokenization_delimiter) and self.model_type != "char"
        lines = TrainingLines(
            corpus,
            max_bytes=self.max_sentence_length,
            max_lines=self.input_sentence_size,
            sample_seed=self.random_seed if self.shuffle_input_sentence else None,
            change=self._delimiter_function() if uses_delimiter else None,
            progress=progress,
        )
        arguments = self._arguments()
        if uses_delimiter:  # the lines are measured before they grow; the trainer drops what is too long silently
            arguments["max_sentence_length"] = LONGEST_LINE
        content = round_scores(train_model(arguments, lines), max_sentence_length=self.max_sentence_length)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / FILES[CLASS]
        file.write_bytes(content)
        processor = sentencepiece_folder.load_model(file)
        self._save(folder, processor, self._pieces_by_role(processor))
        lines.warn()
        return {"pieces": processor.get_piece_size(), **lines.facts}

    def import_file(self, file: Path, folder: Path) -> Mapping[str, Any]:
        """Makes the folder `folder` from the existing model `file`. Uses only the settings `special_tokens`, the names
        of pieces, and those for MeCab."""
        processor = sentencepiece_folder.load_model(file)
        requested = {role: piece for role in ROLES if (piece := getattr(self, f"{role}_piece")) is not None}
        for role, piece in requested.items():
            if not sentencepiece_folder.has_piece(processor, piece):
                raise UserError(f"{file}: {role}_piece: expected a piece of this model, got {piece}")
        pieces = {**sentencepiece_folder.roles_of(processor), **requested}
        missing = [role for role in ("cls", "sep", "mask", "pad") if role not in pieces]
        if self.special_tokens == "bert" and missing:
            raise UserError(
                f"{file}: special_tokens bert: this model has no piece for {', '.join(missing)}; name one with "
                f"{missing[0]}_piece, or leave special_tokens out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / FILES[CLASS])
        self._save(folder, processor, pieces)
        return {"pieces": processor.get_piece_size(), **{f"{role} token": piece for role, piece in pieces.items()}}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Implements `Tokenizer.from_folder`: reads folders of this kind, folders of a class of Transformers that keeps
        the model's ids, and folders with only a model file."""
        model = sentencepiece_folder.model_file(folder)
        if model is None:
            return None
        file, config = model
        if not config:
            logger.warning(
                "%s: only a model file: its ids are right, but AutoTokenizer cannot load what is exported with it; use "
                "terakoya tokenizer import %s --type %s --out DIR",
                folder,
                file,
                NAME,
            )
        record = folder / RECORD
        if record.is_file():
            content = json.loads(record.read_text(encoding="utf-8"))
            if content.get("type") == NAME:
                known = {name: value for name, value in content["settings"].items() if name in cls.model_fields}
                return cls.model_validate(known)
        return cls(vocab_size=sentencepiece_folder.load_model(file).get_piece_size())

    def load(self, folder: Path) -> PreTrainedTokenizerBase:
        return sentencepiece_folder.load_tokenizer(folder)

    def encoder(self, folder: Path) -> SentencePieceEncoder:
        return SentencePieceEncoder(
            sentencepiece_folder.read_sentencepiece_folder(folder),
            self._word_bounds() if self.pretokenization_delimiter else None,
            parse=self.special_tokens_in_text != "split",
            load=functools.partial(self.load, folder),
        )

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        model = sentencepiece_folder.model_file(folder)
        if model is None:
            raise UserError(f"{folder}: expected a SentencePiece tokenizer's folder")
        file, config = model
        tokens = {name: value for name, value in config.items() if name not in ("name_or_path", "model_max_length")}
        return {
            "model": hashlib.sha256(file.read_bytes()).hexdigest(),
            "tokenizer_config": hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest(),
            **self._versions(),
        }

    # ---------------------------------------------------------------------------------------- the trainer's arguments

    def _id(self, role: str) -> int:
        defaults = {"gpt": (0, 1, 2, -1), "bert": (1, 2, 3, 0)}[self.special_tokens]
        given: int | None = getattr(self, f"{role}_id")
        return given if given is not None else defaults[("unk", "bos", "eos", "pad").index(role)]

    def _piece(self, role: str) -> str | None:
        bert = {"unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
        gpt = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
        given: str | None = getattr(self, f"{role}_piece")
        if given is None and self.special_tokens == "bert" and role in ("cls", "sep"):
            return self._piece({"cls": "bos", "sep": "eos"}[role])
        return given or (bert if self.special_tokens == "bert" else gpt).get(role)

    def _arguments(self) -> dict[str, Any]:
        own = {"special_tokens", "special_tokens_in_text", "dictionary", "mecab_option"}
        own |= {"input_sentence_size", "shuffle_input_sentence", "random_seed"}
        own.update(f"{role}_piece" for role in ("cls", "sep", "mask"))
        arguments = {
            name: value for name, value in self.model_dump().items() if name not in own and value not in ("", None)
        }
        if self.add_dummy_prefix is None:
            arguments["add_dummy_prefix"] = self.special_tokens == "gpt"
        for role in ("unk", "bos", "eos", "pad"):
            arguments[f"{role}_id"], arguments[f"{role}_piece"] = self._id(role), self._piece(role)
        symbols = {*self.user_defined_symbols, *self.control_symbols}
        symbols.update(str(self._piece(role)) for role in ("unk", "bos", "eos", "pad") if self._id(role) >= 0)
        role_pieces = [
            piece for role in ("cls", "sep", "mask") if (piece := self._piece(role)) and piece not in symbols
        ]
        arguments["control_symbols"] = [*self.control_symbols, *dict.fromkeys(role_pieces)]
        arguments["user_defined_symbols"] = list(self.user_defined_symbols)
        if not self.train_extremely_large_corpus:  # newer versions do not need it and warn when it is given
            del arguments["train_extremely_large_corpus"]
        if self.model_type == "char":  # a character is always in one word, and the trainer refuses the option
            arguments.pop("pretokenization_delimiter", None)
        return {name: value for name, value in arguments.items() if value != []}

    def _roles(self) -> list[str]:
        return [role for role in ROLES if self.special_tokens != "bert" or role not in ("bos", "eos")]

    def _pieces_by_role(self, processor: SentencePieceProcessor) -> dict[str, str]:
        """Returns role -> piece for the roles whose piece is in the model. BERT has no bos and eos."""
        pieces = {role: piece for role in self._roles() if (piece := self._piece(role)) is not None}
        return {role: piece for role, piece in pieces.items() if sentencepiece_folder.has_piece(processor, piece)}

    def _delimiter_function(self) -> Callable[[str], str]:
        """Returns a function that normalises a line as the model does and inserts delimiters between its words."""
        from sentencepiece import SentencePieceNormalizer

        rules: dict[str, Any] = {"rule_name": self.normalization_rule_name}
        if self.normalization_rule_tsv:
            rules = {"rule_tsv": self.normalization_rule_tsv}
        normalizer = SentencePieceNormalizer(
            **rules,
            add_dummy_prefix=False,
            escape_whitespaces=False,
            remove_extra_whitespaces=self.remove_extra_whitespaces,
        )
        words = self._word_bounds()
        return lambda line: words.insert_delimiters(normalizer.normalize(line), self.pretokenization_delimiter)

    def _word_bounds(self) -> WordBounds:
        return WordBounds(
            self._mecab_options(), space_is_suffix=self.treat_whitespace_as_suffix, symbols=self.user_defined_symbols
        )

    def _mecab_options(self) -> str:
        return mecab.dictionary_options(self.dictionary, self.mecab_option)

    def _save(self, folder: Path, processor: SentencePieceProcessor, pieces: Mapping[str, str]) -> None:
        """Writes all files of the folder but the model; a tokenizer.json, where it has the model's ids."""
        unused = set() if self.pretokenization_delimiter else {"dictionary", "mecab_option"}
        record = {
            "type": NAME,
            "settings": self.model_dump(mode="json", exclude={"special_tokens_in_text", *unused}),
            "versions": self._versions(),
        }
        cls_sep = self.special_tokens == "bert"
        model = processor.serialized_model_proto()
        try:
            backend = build_backend(model, pieces, cls_sep=cls_sep)
            backend.save(str(folder / "tokenizer.json"))
            if not adds_up(model):
                logger.warning(
                    "tokenizer: SentencePiece adds the model's scores up in float32, Transformers in float64: a line "
                    "with two divisions that are all but equally likely, a few in 20,000, can get other ids than "
                    "SentencePiece's own; `prepare` takes those of Transformers, at a fifth of the speed"
                )
        except NotConvertibleError as error:
            backend = None
            logger.warning("tokenizer: no tokenizer.json, and so no offsets in Transformers: %s", error)
        config = sentencepiece_folder.config_of(processor, pieces, cls_sep=cls_sep, fast=backend is not None)
        size = processor.get_piece_size()
        vocabulary = "".join(f"{processor.id_to_piece(id)}\t{processor.get_score(id):g}\n" for id in range(size))
        (folder / FILES[CLASS]).with_suffix(".vocab").write_text(vocabulary, encoding="utf-8", newline="\n")
        for name, content in (("tokenizer_config.json", config), (RECORD, record)):
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        sentencepiece_folder.check_decoding(processor, backend or sentencepiece_folder.load_tokenizer(folder))

    def _versions(self) -> dict[str, str]:
        """Returns the versions of everything that ids, and word starts if known, depend on."""
        versions = {"sentencepiece": importlib.metadata.version("sentencepiece")}
        if self.pretokenization_delimiter:
            versions["fugashi"] = importlib.metadata.version("fugashi")
            versions["dictionary"] = mecab.options_fingerprint(self._mecab_options())
        return versions


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    return {NAME: SentencePiece}
