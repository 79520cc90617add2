"""BertJapaneseTokenizer over MeCab as a fast tokenizer of Transformers: the same ids, with offsets and words.

See docs/design/fast-japanese-tokenizer.md.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, BertJapaneseTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import (
    BatchEncoding,
    PaddingStrategy,
    PreTrainedTokenizerBase,
    TruncationStrategy,
)

from terakoya_tokenizer.added_tokens import AddedTokens
from terakoya_tokenizer.backend import MecabBackend
from terakoya_tokenizer.characters import Characters, lower_cased
from terakoya_tokenizer.encodings import PlainEncodings
from terakoya_tokenizer.mecab import MecabSplitter, mecab_options, place_user_dictionaries
from terakoya_tokenizer.spans import SpanEncoder
from terakoya_tokenizer.wordpiece import MAX_CHARACTERS, PREFIX, Pieces, WordPiece

logger = logging.getLogger(__name__)

_VOCABULARY = "vocab.txt"


class BertJapaneseTokenizerFast(PreTrainedTokenizerFast):
    """A fast tokenizer for the folders of BertJapaneseTokenizer that split words with MeCab into pieces or characters.

    It takes that class's arguments, gives its ids, and saves a folder that loads as that class."""

    vocab_files_names = {"vocab_file": _VOCABULARY}  # noqa: RUF012 - Transformers' name and form
    model_input_names = BertJapaneseTokenizer.model_input_names
    slow_tokenizer_class = BertJapaneseTokenizer

    def __init__(
        self,
        vocab_file: str,
        spm_file: None = None,
        do_lower_case: bool = False,
        do_word_tokenize: bool = True,
        do_subword_tokenize: bool = True,
        word_tokenizer_type: str = "basic",
        subword_tokenizer_type: str = "wordpiece",
        never_split: list[str] | None = None,
        unk_token: str = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str = "[MASK]",
        mecab_kwargs: Mapping[str, Any] | None = None,
        sudachi_kwargs: Mapping[str, Any] | None = None,
        jumanpp_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raises UnsupportedKindError (a ValueError) for another word splitter than MeCab, and for SentencePiece."""
        kwargs.pop("vocab", None)  # the path once more, from Transformers 5
        settings = {
            "do_lower_case": do_lower_case,
            "do_word_tokenize": do_word_tokenize,
            "do_subword_tokenize": do_subword_tokenize,
            "word_tokenizer_type": word_tokenizer_type,
            "subword_tokenizer_type": subword_tokenizer_type,
            "never_split": never_split,
            "mecab_kwargs": mecab_kwargs,
            "sudachi_kwargs": sudachi_kwargs,
            "jumanpp_kwargs": jumanpp_kwargs,
        }
        _check_kind(settings)
        self._lines = Path(vocab_file).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        vocabulary = {piece: id for id, piece in enumerate(self._lines)}
        model = models.WordPiece(
            vocabulary,
            unk_token=str(unk_token),
            continuing_subword_prefix=PREFIX,
            max_input_chars_per_word=MAX_CHARACTERS,
        )
        library = Tokenizer(model)
        library.decoder = decoders.WordPiece(prefix=PREFIX, cleanup=False)
        super().__init__(
            tokenizer_object=library,
            spm_file=spm_file,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=mask_token,
            **settings,
            **kwargs,
        )
        placed = place_user_dictionaries(mecab_kwargs, Path(vocab_file).parent)
        build = functools.partial(build_encoder, vocabulary, self.unk_token_id, {**settings, "mecab_kwargs": placed})
        backend: Any = self._tokenizer  # with the added tokens, which Transformers has put into it
        self._tokenizer: Any = MecabBackend(backend, build)
        self.update_post_processor()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *inputs: Any, trust_remote_code: bool = False, **kwargs: Any
    ) -> Any:
        """Returns the tokenizer of a folder or of a name on the Hub; a BertJapaneseTokenizer where words are split
        otherwise than with MeCab."""
        try:
            return super().from_pretrained(
                pretrained_model_name_or_path, *inputs, trust_remote_code=trust_remote_code, **kwargs
            )
        except UnsupportedKindError as error:
            logger.warning("%s: %s", pretrained_model_name_or_path, error)
            return BertJapaneseTokenizer.from_pretrained(
                pretrained_model_name_or_path, *inputs, trust_remote_code=trust_remote_code, **kwargs
            )

    def update_post_processor(self) -> None:
        """Puts [CLS] and [SEP] around texts and pairs of texts."""
        if isinstance(self._tokenizer, MecabBackend):  # not yet in Transformers' constructor
            self._tokenizer.surround(self.cls_token_id, self.sep_token_id)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Returns the ids of a text or of two with [CLS] and [SEP] around them; Transformers 4 calls this in
        `prepare_for_model`."""
        first = [self.cls_token_id, *token_ids_0, self.sep_token_id]
        return first if token_ids_1 is None else [*first, *token_ids_1, self.sep_token_id]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Returns 0 for each token of the first text and those around it, 1 for each of the second and its [SEP]."""
        both = len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))
        first = len(token_ids_0) + 2
        return [0] * first + [1] * (both - first)

    def train_new_from_iterator(self, *_: Any, **__: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "a BertJapaneseTokenizerFast trains no other tokenizer; with terakoya, `terakoya tokenizer train CORPUS "
            "--type mecab_wordpiece` does, or mecab_character"
        )

    def _encode_plus(self, text: Any, text_pair: Any = None, **options: Any) -> BatchEncoding:  # Transformers 5
        if text_pair is None and _are_texts(text, options):
            return self._encode_texts(text, **options)
        encoded: BatchEncoding = super()._encode_plus(text, text_pair, **options)
        return encoded

    def _batch_encode_plus(self, batch_text_or_text_pairs: Any, **options: Any) -> BatchEncoding:  # Transformers 4
        if _are_texts(batch_text_or_text_pairs, options):
            return self._encode_texts(batch_text_or_text_pairs, **options)
        encoded: BatchEncoding = super()._batch_encode_plus(batch_text_or_text_pairs, **options)
        return encoded

    def _encode_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
        truncation_strategy: TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE,
        max_length: int | None = None,
        stride: int = 0,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Any = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        split_special_tokens: bool | None = None,
        **_: Any,
    ) -> BatchEncoding:
        """Returns what Transformers returns for several texts. Going through them one by one, as it does, takes a tenth
        of all time."""
        self.set_truncation_and_padding(
            padding_strategy, truncation_strategy, max_length, stride, pad_to_multiple_of, padding_side
        )
        self._tokenizer.encode_special_tokens = (
            self.split_special_tokens if split_special_tokens is None else split_special_tokens
        )
        encodings = self._tokenizer.encode_texts(texts, add_special_tokens)
        wanted = {
            "input_ids": "ids",
            "token_type_ids": self._wants("token_type_ids", return_token_type_ids) and "type_ids",
            "attention_mask": self._wants("attention_mask", return_attention_mask) and "attention_mask",
            "special_tokens_mask": return_special_tokens_mask and "special_tokens_mask",
            "offset_mapping": return_offsets_mapping and "offsets",
        }
        if isinstance(encodings, PlainEncodings):
            data: dict[str, Any] = {key: encodings.column(name) for key, name in wanted.items() if name}
        else:
            data = {key: [getattr(each, name) for each in encodings] for key, name in wanted.items() if name}
        if return_length:
            data["length"] = list(map(len, data["input_ids"]))
        self._eventual_warn_about_too_long_sequence(max(data["input_ids"], key=len), max_length, verbose)
        return BatchEncoding(data, encodings, tensor_type=return_tensors)

    def _wants(self, name: str, asked: bool | None) -> bool:
        return name in self.model_input_names if asked is None else asked

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text of `tokens`, with a space between words, as BertJapaneseTokenizer does."""
        return " ".join(tokens).replace(f" {PREFIX}", "").strip()

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        tokens = self.convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)
        if spaces_between_special_tokens:
            text = self.convert_tokens_to_string(tokens)
        else:  # of the added tokens, those that are not among the pieces
            own = {str(token) for id, token in self.added_tokens_decoder.items() if id >= len(self._lines)}
            parts = itertools.groupby(tokens, own.__contains__)
            text = "".join("".join(part) if added else self.convert_tokens_to_string([*part]) for added, part in parts)
        clean = self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else True
        return self.clean_up_tokenization(text) if clean and clean_up_tokenization_spaces is not False else text

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Writes vocab.txt and returns its path."""
        file = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}{_VOCABULARY}"
        file.write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8", newline="\n")
        return (str(file),)

    def _save_pretrained(
        self,
        save_directory: Any,
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        """Writes the files of BertJapaneseTokenizer, which knows no tokenizer.json and reads the added tokens in
        tokenizer_config.json."""
        config = next(Path(name) for name in file_names if name.endswith("tokenizer_config.json"))
        content = json.loads(config.read_text(encoding="utf-8"))
        content.pop("backend", None)
        content["added_tokens_decoder"] = {id: token.__getstate__() for id, token in self.added_tokens_decoder.items()}
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        config.write_text(text, encoding="utf-8", newline="\n")
        written: tuple[str, ...] = PreTrainedTokenizerBase._save_pretrained(
            self, save_directory, file_names, None, filename_prefix
        )
        return written


class UnsupportedKindError(ValueError):
    """The fast tokenizer does not split words in this way."""


class _JapaneseBertConfig(PretrainedConfig):
    """The key under which `AutoTokenizer` keeps the fast tokenizer; no model has it."""

    model_type = "bert-japanese"


def register() -> None:
    """Makes `AutoTokenizer` give a `BertJapaneseTokenizerFast` for folders of a BertJapaneseTokenizer.

    Not for those that it reads with code of their own (`trust_remote_code=True`), nor for those that Transformers does
    not load: ModernBERT's without `auto_map`."""
    AutoTokenizer.register(
        _JapaneseBertConfig,
        slow_tokenizer_class=BertJapaneseTokenizer,
        fast_tokenizer_class=BertJapaneseTokenizerFast,
        exist_ok=True,
    )


def build_encoder(
    vocabulary: Mapping[str, int], unknown: int, settings: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> SpanEncoder:
    """Returns the encoder of a tokenizer with these pieces, the id of its unknown token, the arguments of
    BertJapaneseTokenizer and the added tokens."""
    arguments = settings["mecab_kwargs"] or {}
    characters = settings["subword_tokenizer_type"] == "character"
    splitting = Characters(vocabulary, unknown) if characters else WordPiece(vocabulary, unknown)
    pieces: Callable[[str], Pieces] = splitting.pieces
    if settings["do_lower_case"]:
        special = {str(token) for token in added.values() if token.special}
        pieces = lower_cased(pieces, special.union(settings["never_split"] or ()))
    normalize = arguments.get("normalize_text", True)
    splitter = MecabSplitter(mecab_options(arguments), normalize=normalize, white_space=characters)
    return SpanEncoder(splitter, pieces, AddedTokens(added))


def _are_texts(texts: Any, options: Mapping[str, Any]) -> bool:
    """Returns whether `texts` are several texts, each of which gives one row."""
    others = ("is_split_into_words", "return_overflowing_tokens", "sanitize_control_tokens")
    if any(options.get(name) for name in others) or not isinstance(texts, (list, tuple)) or not texts:
        return False
    return all(isinstance(text, str) for text in texts)


def _check_kind(settings: Mapping[str, Any]) -> None:
    """Raises UnsupportedKindError for what the fast tokenizer does not do."""
    words, pieces = settings["word_tokenizer_type"], settings["subword_tokenizer_type"]
    whole = settings["do_word_tokenize"] and settings["do_subword_tokenize"]
    if words != "mecab" or pieces not in ("wordpiece", "character") or not whole:
        raise UnsupportedKindError(
            "the fast tokenizer needs do_word_tokenize and do_subword_tokenize, word_tokenizer_type mecab and "
            f'subword_tokenizer_type wordpiece or character, got "{words}" and "{pieces}"; BertJapaneseTokenizer takes '
            "them"
        )
