"""Japanese WordPiece inside words, for Transformers' BertJapaneseTokenizer, with parallel training and fast encoding.

Training follows Tohoku University's Japanese BERT (https://github.com/cl-tohoku/bert-japanese): NFKC, MeCab's words,
then BERT's WordPiece, with the same special tokens and unused slots. Other analysers can split the words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import bert_japanese_folder as japanese_folder
from terakoya.toolkit.tokenizers import word_splitters
from terakoya.toolkit.tokenizers.bert_folder import read_bert_folder, read_config, read_vocabulary
from terakoya.toolkit.tokenizers.bpe_merges import warn_of_few_pieces
from terakoya.toolkit.tokenizers.word_counts_file import Splitting, load_or_count_words
from terakoya.toolkit.tokenizers.word_encoder import WordEncoder
from terakoya.toolkit.tokenizers.wordpiece import WordPiece, bert_words, train_wordpiece

NAME = "mecab_wordpiece"
_TRANSFORMERS_NAMES = {"mecab": "mecab", "sudachi": "sudachi", "juman": "jumanpp", "basic": "basic"}


class MecabWordPiece(Tokenizer):
    """WordPiece inside the words of MeCab or of another analyser."""

    word_tokenizer: Literal["mecab", "sudachi", "juman", "spacy", "basic", "none"] = "mecab"
    """What splits words. `sudachi` needs sudachipy and a dictionary, `juman` needs rhoknp and the program jumanpp;
    `basic` is BERT's own (white space and punctuation), `none` white space only. `spacy` is refused with the reason."""
    dictionary: str = "unidic_lite"
    """For `mecab`: `ipadic`, `unidic_lite`, `unidic` or the folder of a compiled MeCab dictionary."""
    mecab_option: str = ""
    """Further options for MeCab, such as `-u USER.dic`, which is copied into the folder."""
    sudachi_split_mode: Literal["A", "B", "C"] = "A"
    """For `sudachi`: A short units, B middle units, C whole named entities."""
    sudachi_dict_type: Literal["small", "core", "full"] = "core"
    """For `sudachi`: the size of its dictionary."""
    vocab_size: int = Field(default=32768, ge=1)
    """Number of pieces, including special tokens and unused slots."""
    min_frequency: int = Field(default=2, ge=1)
    """How often a pair of pieces must occur to be merged."""
    limit_alphabet: int | None = Field(default=None, ge=1)
    """Number of characters with a piece of their own, the most frequent ones; others become [UNK]. null is 6,129, or as
    many as leave a quarter of the vocabulary for longer pieces."""
    num_unused_tokens: int = Field(default=10, ge=0)
    """Empty slots [unused0], [unused1], ... for tokens added later. Unit: tokens."""
    do_lower_case: bool = False
    """Whether text is lower-cased first. With `basic` words accents go, too, and dakuten is one."""
    sample_bytes: int | None = Field(default=None, ge=1)
    """Train on about this much text, evenly taken from the corpus; null is all of it. Unit: bytes."""
    max_words: int = Field(default=2_000_000, ge=1000)
    """Distinct words counted at a time; beyond this the rarest are dropped and the error is reported."""
    counts: Path | None = None
    """A table that `terakoya tokenizer count` has written for the same corpus; null counts now."""

    def splitting(self) -> Splitting:
        """Implements `WordCountTokenizer`: the analyser splits words. Raises UserError if it is not installed."""
        return japanese_folder.splitting(self._config(), max_words=self.max_words, sample_bytes=self.sample_bytes)

    def planned_vocabulary(self) -> Vocabulary:
        return japanese_folder.planned_vocabulary(self.vocab_size, self.num_unused_tokens)

    def train(
        self, corpus: Corpus, folder: Path, *, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> Mapping[str, Any]:
        """Implements `Tokenizer.train`. The files are the same for any number of processes."""
        table = load_or_count_words(corpus, self.splitting(), file=self.counts, processes=processes, progress=progress)
        words = bert_words(table.counts, lower=self.do_lower_case)
        pieces = train_wordpiece(
            words,
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            limit_alphabet=self.limit_alphabet,
            special_tokens=japanese_folder.special_tokens(self.num_unused_tokens),
        )
        japanese_folder.save_folder(folder, pieces, self._config(), NAME, self)
        warn_of_few_pieces(len(pieces), vocab_size=self.vocab_size, min_frequency=self.min_frequency)
        left_out = set().union(*words).difference(pieces)
        return {"pieces": len(pieces), "characters_left_out": len(left_out), **table.facts(self.max_words)}

    def import_file(self, file: Path, folder: Path) -> Mapping[str, Any]:
        """Implements `ModelImporter`: writes the folder of `file`, a vocab.txt with one piece a line, whose words were
        split as the settings say. Raises UserError if it cannot be read, or lacks a special token."""
        try:
            pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: expected a vocab.txt with one piece a line: {error}") from error
        if missing := [token for token in japanese_folder.SPECIAL_TOKENS if token not in pieces]:
            raise UserError(f"{file}: expected a vocab.txt with one piece a line; it has no {', '.join(missing)}")
        sized = self.model_copy(update={"vocab_size": len(pieces)})
        japanese_folder.save_folder(folder, pieces, self._config(), NAME, sized)
        return {"pieces": len(pieces)}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Implements `Tokenizer.from_folder`: any BertJapaneseTokenizer with WordPiece that no other kind trained."""
        config = read_config(folder)
        if config is None or not _is_supported(config):
            return None
        kind, recorded = japanese_folder.read_record(folder)
        if kind not in (None, NAME):
            return None
        settings = {name: value for name, value in recorded.items() if name in cls.model_fields}
        settings.setdefault("vocab_size", len(read_vocabulary(folder / "vocab.txt")))
        words = word_splitters.splitter_kind(config)
        settings["word_tokenizer"] = "juman" if words == "jumanpp" else words
        if words == "mecab":
            mecab = japanese_folder.mecab_settings(config, recorded)
            if mecab is None:
                return None
            settings |= mecab
        elif words == "sudachi":
            given = config.get("sudachi_kwargs") or {}
            known = ("sudachi_split_mode", "sudachi_dict_type")
            settings |= {name: value for name, value in given.items() if name in known}
        settings["do_lower_case"] = bool(config.get("do_lower_case", False))
        return cls.model_validate(settings)

    def encoder(self, folder: Path) -> WordEncoder:
        """Implements `Tokenizer.encoder`. Uses the settings of the folder, and its own `special_tokens_in_text`."""
        bert = read_bert_folder(folder)
        # `basic` lowers case itself, `none` never does.
        lowers = word_splitters.splitter_kind(bert.config) not in ("basic", "none")
        return WordEncoder(
            bert,
            word_splitters.build_splitter(bert.config, special=list(bert.special)),
            WordPiece(bert.pieces, bert.unknown).pieces,
            parse=self.special_tokens_in_text != "split",
            lower=lowers and bool(bert.config.get("do_lower_case", False)),
            load=functools.partial(self.load, folder),
        )

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        return japanese_folder.fingerprint(folder)

    def _config(self) -> dict[str, Any]:
        """Returns the tokenizer_config.json. UserError if no folder that AutoTokenizer loads gives the same ids."""
        if self.word_tokenizer == "spacy":
            raise UserError(
                "word_tokenizer spacy: Transformers has no tokenizer that splits words with spaCy, so no folder that "
                "AutoTokenizer loads could give the ids of this training; sudachi with sudachi_split_mode C gives "
                "words of similar length"
            )
        words: dict[str, Any]
        if self.word_tokenizer == "mecab":
            words = japanese_folder.mecab_words(self.dictionary, self.mecab_option)
        elif self.word_tokenizer == "none":
            if self.do_lower_case:
                raise UserError(
                    "do_lower_case: expected false with word_tokenizer none, got true: Transformers keeps case "
                    "if it does not split words, so no folder gives these ids; choose word_tokenizer basic"
                )
            words = {"word_tokenizer_type": "basic", "do_word_tokenize": False}
        else:
            words = {"word_tokenizer_type": _TRANSFORMERS_NAMES[self.word_tokenizer]}
        if self.word_tokenizer == "sudachi":
            words["sudachi_kwargs"] = {
                "sudachi_split_mode": self.sudachi_split_mode,
                "sudachi_dict_type": self.sudachi_dict_type,
            }
        return japanese_folder.japanese_config(words, do_lower_case=self.do_lower_case)


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    return {NAME: MecabWordPiece}


def _is_supported(config: Mapping[str, Any]) -> bool:
    return (
        config.get("tokenizer_class") == "BertJapaneseTokenizer"
        and word_splitters.splitter_kind(config) in ("mecab", "sudachi", "jumanpp", "basic", "none")
        and config.get("subword_tokenizer_type", "wordpiece") == "wordpiece"
        and config.get("do_subword_tokenize", True)
    )
