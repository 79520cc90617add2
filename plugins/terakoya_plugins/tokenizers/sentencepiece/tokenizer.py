"""SentencePiece (https://github.com/google/sentencepiece): unigram, BPE and characters, trained from documents.

The options are those of its trainer, under its names and with its defaults. `pretokenization_delimiter` keeps pieces
inside MeCab's words while the model is learnt.
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
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import mecab, sentencepiece_folder
from terakoya.toolkit.tokenizers.sentencepiece_folder import CLASS, FILES, RECORD, ROLES
from terakoya_plugins.tokenizers.sentencepiece.encoder import SentencePieceEncoder
from terakoya_plugins.tokenizers.sentencepiece.trainer import TrainingLines, train_model
from terakoya_plugins.tokenizers.sentencepiece.words import WordBounds

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

NAME = "sentencepiece"
Symbols = Annotated[tuple[str, ...], Field(strict=False)]
Id = Annotated[int, Field(ge=-1)]

logger = logging.getLogger("terakoya")


class SentencePiece(Tokenizer):
    """A SentencePiece model; ids are the library's own."""

    model_config = ConfigDict(strict=True)
    keeps_line_ends: ClassVar[bool] = True
    trial: ClassVar[Mapping[str, Any]] = {"vocab_size": 120}

    model_type: Literal["unigram", "bpe", "char"] = "unigram"
    vocab_size: int = Field(default=8000, ge=1)
    """Pieces in all."""
    character_coverage: float = Field(default=0.9995, ge=0.98, le=1)
    """The share of the text's characters that get a piece; others are unknown, or bytes with `byte_fallback`."""
    byte_fallback: bool = False
    """Whether characters without a piece become their UTF-8 bytes."""
    split_digits: bool = False
    split_by_number: bool = True
    split_by_unicode_script: bool = True
    split_by_whitespace: bool = True
    treat_whitespace_as_suffix: bool = False
    allow_whitespace_only_pieces: bool = False
    pretokenization_delimiter: str = ""
    """Put between MeCab's words while training, for example "||||", so that no piece is learnt across words. Word
    starts are then known, so that whole words can be masked. Empty: MeCab is not used."""
    dictionary: str = "unidic_lite"
    """With `pretokenization_delimiter`: `ipadic`, `unidic_lite`, `unidic` or a compiled MeCab dictionary's folder."""
    mecab_option: str = ""
    """With `pretokenization_delimiter`: further options for MeCab, such as `-u USER.dic`."""
    normalization_rule_name: Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"] = "nmt_nfkc"
    normalization_rule_tsv: str = ""
    """A file of rules that take the place of `normalization_rule_name`."""
    add_dummy_prefix: bool | None = None
    """Whether a space is put before each text. None: for `gpt`, not for `bert`, where Transformers would put one behind
    each [MASK] too, a place where training never has one."""
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    user_defined_symbols: Symbols = ()
    """Strings that are always one piece; a list, or separated by commas."""
    control_symbols: Symbols = ()
    """Pieces that no text becomes."""
    required_chars: str = ""
    """Characters that get a piece whatever `character_coverage` says."""
    special_tokens: Literal["gpt", "bert"] = "gpt"
    """`gpt`: <unk>, <s>, </s> at 0, 1, 2. `bert`: [PAD], [UNK], [CLS], [SEP] at 0 to 3, and [MASK]; `tokenizer(text)`
    gives [CLS] text [SEP]. The eight keys below change names and places; an id of -1 leaves a piece out."""
    unk_id: int | None = Field(default=None, ge=0)
    bos_id: Id | None = None
    eos_id: Id | None = None
    pad_id: Id | None = None
    unk_piece: str | None = Field(default=None, min_length=1)
    bos_piece: str | None = Field(default=None, min_length=1)
    eos_piece: str | None = Field(default=None, min_length=1)
    pad_piece: str | None = Field(default=None, min_length=1)
    cls_piece: str | None = Field(default=None, min_length=1)
    """The piece that plays [CLS]; added if it is not among the symbols. As well `sep_piece` and `mask_piece`."""
    sep_piece: str | None = Field(default=None, min_length=1)
    mask_piece: str | None = Field(default=None, min_length=1)
    unk_surface: str = " ⁇ "
    input_sentence_size: int = Field(default=0, ge=0)
    """Learn from so many lines, drawn over the corpus with `shuffle_input_sentence`, else the first. 0: from all."""
    shuffle_input_sentence: bool = True
    random_seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Says which lines are drawn."""
    max_sentence_length: int = Field(default=4192, ge=10, le=1 << 30)
    """Longer lines, in bytes, are left out of training, and counted."""
    num_threads: int = Field(default=16, ge=1, le=1024)
    """Threads of the trainer: with equal numbers, equal bytes come out."""
    train_extremely_large_corpus: bool = False
    seed_sentencepiece_size: int = Field(default=1_000_000, ge=1)
    seed_sentencepieces_file: str = ""
    shrinking_factor: float = Field(default=0.75, gt=0, lt=1)
    num_sub_iterations: int = Field(default=2, ge=1)
    max_sentencepiece_length: int = Field(default=16, ge=1)
    """The longest piece, in characters."""
    hard_vocab_limit: bool = True
    use_all_vocab: bool = False

    @field_validator("user_defined_symbols", "control_symbols", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        return next(csv.reader([value]), []) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        fields = type(self).model_fields
        if not self.pretokenization_delimiter:
            given = [key for key in ("dictionary", "mecab_option") if getattr(self, key) != fields[key].default]
            for key in given:
                raise ValueError(f'{key}: MeCab is used only with pretokenization_delimiter, for example "||||"')
        ids = [id for id in (self._id(role) for role in ("unk", "bos", "eos", "pad")) if id >= 0]
        if len(set(ids)) < len(ids):
            raise ValueError(f"unk_id, bos_id, eos_id, pad_id: expected four different ids (-1: none), got {ids}")
        return self

    def train(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        """See `Tokenizer.train`. The trainer's own `num_threads` counts, not `processes`."""
        cuts = bool(self.pretokenization_delimiter) and self.model_type != "char"
        lines = TrainingLines(
            corpus,
            max_bytes=self.max_sentence_length,
            most=self.input_sentence_size,
            draw=self.random_seed if self.shuffle_input_sentence else None,
            change=self._with_delimiters() if cuts else None,
            progress=progress,
        )
        content = train_model(self._arguments(), lines)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / FILES[CLASS]
        file.write_bytes(content)
        processor = sentencepiece_folder.load_model(file)
        self._save(folder, processor, self._named(processor))
        lines.warn()
        return {"pieces": processor.get_piece_size(), **lines.facts}

    def import_file(self, file: Path, folder: Path) -> Mapping[str, Any]:
        """Makes the existing model `file` into the folder `folder`. Of the settings, `special_tokens`, the pieces'
        names and those for MeCab count."""
        processor = sentencepiece_folder.load_model(file)
        asked = {role: piece for role in ROLES if (piece := getattr(self, f"{role}_piece")) is not None}
        for role, piece in asked.items():
            if not sentencepiece_folder.has_piece(processor, piece):
                raise UserError(f"{file}: {role}_piece: expected a piece of this model, got {piece}")
        named = {**sentencepiece_folder.roles_of(processor), **asked}
        missing = [role for role in ("cls", "sep", "mask", "pad") if role not in named]
        if self.special_tokens == "bert" and missing:
            raise UserError(
                f"{file}: special_tokens bert: this model has no piece for {', '.join(missing)}; name one with "
                f"{missing[0]}_piece, or leave special_tokens out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / FILES[CLASS])
        self._save(folder, processor, named)
        return {"pieces": processor.get_piece_size(), **{f"{role} token": piece for role, piece in named.items()}}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """See `Tokenizer.from_folder`: a folder made here, one of a class of Transformers that leaves the model's ids
        as they are, or a folder with a bare model in it."""
        found = sentencepiece_folder.model_file(folder)
        if found is None:
            return None
        file, config = found
        if not config:
            logger.warning(
                "%s: a bare model: ids are right, yet AutoTokenizer cannot load what is exported with it; better: "
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
        """See `Tokenizer.load`."""
        return sentencepiece_folder.load_tokenizer(folder)

    def encoder(self, folder: Path) -> SentencePieceEncoder:
        """See `Tokenizer.encoder`."""
        return SentencePieceEncoder(
            sentencepiece_folder.read_sentencepiece_folder(folder),
            self._word_bounds() if self.pretokenization_delimiter else None,
            parse=self.special_tokens_in_text != "split",
            load=functools.partial(self.load, folder),
        )

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        """See `Tokenizer.fingerprint`."""
        found = sentencepiece_folder.model_file(folder)
        if found is None:
            raise UserError(f"{folder}: expected a SentencePiece tokenizer's folder")
        file, config = found
        tokens = {name: value for name, value in config.items() if name not in ("name_or_path", "model_max_length")}
        return {
            "model": hashlib.sha256(file.read_bytes()).hexdigest(),
            "tokenizer_config": hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest(),
            **self._versions(),
        }

    # ------------------------------------------------------------------------------------------------ what is given

    def _id(self, role: str) -> int:
        defaults = {"gpt": (0, 1, 2, -1), "bert": (1, 2, 3, 0)}[self.special_tokens]
        given: int | None = getattr(self, f"{role}_id")
        return given if given is not None else defaults[("unk", "bos", "eos", "pad").index(role)]

    def _piece(self, role: str) -> str | None:
        """The piece that plays `role`, None where there is none."""
        bert = {"unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
        gpt = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
        given: str | None = getattr(self, f"{role}_piece")
        if given is None and self.special_tokens == "bert" and role in ("cls", "sep"):
            return self._piece({"cls": "bos", "sep": "eos"}[role])
        return given or (bert if self.special_tokens == "bert" else gpt).get(role)

    def _arguments(self) -> dict[str, Any]:
        """What the trainer is called with."""
        own = {"special_tokens", "special_tokens_in_text", "dictionary", "mecab_option"}
        own |= {"input_sentence_size", "shuffle_input_sentence", "random_seed"}
        own.update(f"{role}_piece" for role in ("cls", "sep", "mask"))
        given = {
            name: value for name, value in self.model_dump().items() if name not in own and value not in ("", None)
        }
        if self.add_dummy_prefix is None:
            given["add_dummy_prefix"] = self.special_tokens == "gpt"
        for role in ("unk", "bos", "eos", "pad"):
            given[f"{role}_id"], given[f"{role}_piece"] = self._id(role), self._piece(role)
        symbols = {*self.user_defined_symbols, *self.control_symbols}
        symbols.update(str(self._piece(role)) for role in ("unk", "bos", "eos", "pad") if self._id(role) >= 0)
        more = [piece for role in ("cls", "sep", "mask") if (piece := self._piece(role)) and piece not in symbols]
        given["control_symbols"] = [*self.control_symbols, *dict.fromkeys(more)]
        given["user_defined_symbols"] = list(self.user_defined_symbols)
        if not self.train_extremely_large_corpus:  # newer versions need it no longer, and say so whenever it is given
            del given["train_extremely_large_corpus"]
        if self.model_type == "char":  # a character lies in one word, and the trainer refuses the option
            given.pop("pretokenization_delimiter", None)
        return {name: value for name, value in given.items() if value != []}

    def _named(self, processor: SentencePieceProcessor) -> dict[str, str]:
        """Role -> piece, for the roles whose piece the model has. BERT has no bos and eos."""
        roles = [role for role in ROLES if self.special_tokens != "bert" or role not in ("bos", "eos")]
        pieces = {role: piece for role in roles if (piece := self._piece(role)) is not None}
        return {role: piece for role, piece in pieces.items() if sentencepiece_folder.has_piece(processor, piece)}

    def _with_delimiters(self) -> Callable[[str], str]:
        """A function from a line to the line as the model will see it, with delimiters between words."""
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
        return lambda line: words.joined(normalizer.normalize(line), self.pretokenization_delimiter)

    def _word_bounds(self) -> WordBounds:
        return WordBounds(self._mecab(), space_behind=self.treat_whitespace_as_suffix, whole=self.user_defined_symbols)

    def _mecab(self) -> str:
        folder = mecab.dictionary_folder(self.dictionary)
        return f"{mecab.dictionary_options(folder)} {self.mecab_option}".strip()

    def _save(self, folder: Path, processor: SentencePieceProcessor, named: Mapping[str, str]) -> None:
        """Writes what stands beside the model."""
        unused = set() if self.pretokenization_delimiter else {"dictionary", "mecab_option"}
        record = {
            "type": NAME,
            "settings": self.model_dump(mode="json", exclude={"special_tokens_in_text", *unused}),
            "versions": self._versions(),
        }
        config = sentencepiece_folder.config_of(named, cls_sep=self.special_tokens == "bert")
        size = processor.get_piece_size()
        pieces = "".join(f"{processor.id_to_piece(id)}\t{processor.get_score(id):g}\n" for id in range(size))
        (folder / FILES[CLASS]).with_suffix(".vocab").write_text(pieces, encoding="utf-8", newline="\n")
        for name, content in (("tokenizer_config.json", config), (RECORD, record)):
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8", newline="\n")

    def _versions(self) -> dict[str, str]:
        """Versions of what ids, and word starts if they are known, depend on."""
        versions = {"sentencepiece": importlib.metadata.version("sentencepiece")}
        if self.pretokenization_delimiter:
            versions["fugashi"] = importlib.metadata.version("fugashi")
            versions["dictionary"] = mecab.options_fingerprint(self._mecab())
        return versions


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    """Offers `sentencepiece`."""
    return {NAME: SentencePiece}
