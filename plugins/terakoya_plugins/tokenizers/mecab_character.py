"""Characters of MeCab's words, for Transformers' BertJapaneseTokenizer; `##` marks all but the first one of a word.

The marks allow whole-word masking, and the same character has different pieces at the start of a word and inside it.
Transformers' own character mode has no `##`, so the folder is a WordPiece folder whose pieces are single characters.
With `continuation_marks` off it is Transformers' character mode, as in Tohoku University's character models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.toolkit.tokenizers import bert_japanese_folder as japanese_folder
from terakoya.toolkit.tokenizers import word_splitters
from terakoya.toolkit.tokenizers.bert_folder import read_bert_folder, read_config
from terakoya.toolkit.tokenizers.word_counts_file import Splitting, load_or_count_words
from terakoya.toolkit.tokenizers.word_encoder import WordEncoder
from terakoya.toolkit.tokenizers.wordpiece import PREFIX, WordPiece, bert_words, train_wordpiece
from terakoya_tokenizer.characters import Characters

NAME = "mecab_character"


class MecabCharacter(Tokenizer):
    """The characters of MeCab's words. An unknown character turns the whole word into [UNK] (as in WordPiece) with
    `continuation_marks`, and only itself without them."""

    continuation_marks: bool = True
    """Whether a character inside a word has a piece with `##`, different from that at the start of a word."""
    dictionary: str = "unidic_lite"
    """`ipadic`, `unidic_lite`, `unidic` or the folder of a compiled MeCab dictionary."""
    mecab_option: str = ""
    """Further options for MeCab, such as `-u USER.dic`, which is copied into the folder."""
    limit_alphabet: int = Field(default=6129, ge=1)
    """Number of characters in the vocabulary, the most frequent ones; others become [UNK]."""
    num_unused_tokens: int = Field(default=10, ge=0)
    """Empty slots [unused0], [unused1], ... for tokens added later. Unit: tokens."""
    do_lower_case: bool = False
    """Whether text is lower-cased first."""
    sample_bytes: int | None = Field(default=None, ge=1)
    """Train on about this much text, evenly taken from the corpus; null is all of it. Unit: bytes."""
    max_words: int = Field(default=2_000_000, ge=1000)
    """Distinct words counted at a time; beyond this the rarest are dropped and the error is reported."""
    counts: Path | None = None
    """A table that `terakoya tokenizer count` has written for the same corpus; null counts now."""

    def splitting(self) -> Splitting:
        """Implements `WordCountTokenizer`: MeCab's words, the same as for `mecab_wordpiece`. Raises UserError for a
        wrong dictionary or option."""
        return japanese_folder.splitting(self._config(), max_words=self.max_words, sample_bytes=self.sample_bytes)

    def planned_vocabulary(self) -> Vocabulary:
        characters = self.limit_alphabet * (2 if self.continuation_marks else 1)
        return japanese_folder.planned_vocabulary(characters, self.num_unused_tokens)

    def train(
        self, corpus: Corpus, folder: Path, *, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> Mapping[str, Any]:
        """Implements `Tokenizer.train`. The files are the same for any number of processes."""
        table = load_or_count_words(corpus, self.splitting(), file=self.counts, processes=processes, progress=progress)
        pieces = self._pieces(table.counts, japanese_folder.special_tokens(self.num_unused_tokens))
        japanese_folder.save_folder(folder, pieces, self._config(), NAME, self)
        return {"pieces": len(pieces), **table.facts(self.max_words)}

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Implements `Tokenizer.from_folder`: reads folders from `train`, and any BertJapaneseTokenizer with MeCab and
        characters."""
        config = read_config(folder)
        if config is None or config.get("tokenizer_class") != "BertJapaneseTokenizer":
            return None
        kind, recorded = japanese_folder.read_record(folder)
        marks = config.get("subword_tokenizer_type", "wordpiece") == "wordpiece"
        if (
            kind not in (None, NAME)
            or (marks and kind != NAME)
            or word_splitters.splitter_kind(config) != "mecab"
            or config.get("subword_tokenizer_type", "wordpiece") not in ("wordpiece", "character")
            or not config.get("do_subword_tokenize", True)
        ):
            return None
        mecab = japanese_folder.mecab_settings(config, recorded)
        if mecab is None:
            return None
        settings = {name: value for name, value in recorded.items() if name in cls.model_fields} | mecab
        settings["continuation_marks"] = marks
        settings["do_lower_case"] = bool(config.get("do_lower_case", False))
        return cls.model_validate(settings)

    def encoder(self, folder: Path) -> WordEncoder:
        """Implements `Tokenizer.encoder`. Uses the settings of the folder, and its own `special_tokens_in_text`."""
        bert = read_bert_folder(folder)
        marks = bert.config.get("subword_tokenizer_type", "wordpiece") == "wordpiece"
        return WordEncoder(
            bert,
            word_splitters.build_splitter(bert.config, special=list(bert.special), white_space=not marks),
            (WordPiece if marks else Characters)(bert.pieces, bert.unknown).pieces,
            parse=self.special_tokens_in_text != "split",
            lower=bool(bert.config.get("do_lower_case", False)),
            load=functools.partial(self.load, folder),
        )

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        return japanese_folder.fingerprint(folder)

    def _config(self) -> dict[str, Any]:
        return japanese_folder.japanese_config(
            japanese_folder.mecab_words(self.dictionary, self.mecab_option),
            subword_tokenizer_type="wordpiece" if self.continuation_marks else "character",
            do_lower_case=self.do_lower_case,
        )

    def _pieces(self, counts: Mapping[str, int], special: list[str]) -> list[str]:
        """Returns special tokens, characters and, with marks, each character with `##`, whether it occurred or not."""
        pieces = train_wordpiece(
            bert_words(counts, lower=self.do_lower_case),
            vocab_size=len(special) + 2 * self.limit_alphabet,
            min_frequency=1 << 62,  # no pair is that frequent, so the pieces are characters
            limit_alphabet=self.limit_alphabet,
            special_tokens=special,
        )
        characters = [piece for piece in pieces[len(special) :] if len(piece) == 1]
        return [*special, *characters, *(PREFIX + character for character in characters if self.continuation_marks)]


@hookimpl
def register_tokenizers() -> Mapping[str, type[Tokenizer]]:
    return {NAME: MecabCharacter}
