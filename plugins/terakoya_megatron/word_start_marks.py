"""Which ids start a word, for tokenizers whose pieces have marks for it.

WordPiece marks pieces inside a word with `##`; other tokenizers mark the first piece of a word. A mark is verified by a
comparison with the tokenizer's own encoder, which knows words exactly.

See docs/design/word-starts.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from terakoya.components import Tokenizer

_CONTINUES, _BEGINS = "##", ("▁", "Ġ")
_PROBE = """吾輩は猫である。名前はまだ無い。
どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所でニャーニャー泣いていた事だけは記憶している。
国際連合教育科学文化機関は、2026年に東京都千代田区で第45回総会を開催した（参加者数：1,234人）。
スパゲッティ・カルボナーラを食べながら、Tokyoのカフェでプログラミング言語Pythonの勉強をした。
The quick brown foxes were jumping over lazily sleeping dogs; unbelievably, nobody noticed.
鬱蒼とした森の奥で、魑魅魍魎が跋扈する。"""


def word_start_table(tokenizer: Tokenizer, folder: Path) -> np.ndarray | None:
    """Returns (V,) bool, True for ids that start a word; None where the pieces of the tokenizer in `folder` do not
    tell.

    A mark is used only if it agrees with the encoder's own word starts on every token of a text in Japanese and
    English.
    """
    encoder = tokenizer.encoder(folder)
    encoded = encoder.encode([_PROBE])
    if encoded.word_starts is None or encoded.word_starts.all():
        return None
    pieces = tokenizer.load(folder).get_vocab()
    for mark in (_CONTINUES, *_BEGINS):
        table = np.ones(encoder.vocabulary.size, bool)
        for piece, number in pieces.items():
            table[number] = piece.startswith(mark) != (mark == _CONTINUES)
        table[list(encoder.vocabulary.special)] = True
        if np.array_equal(table[encoded.ids], encoded.word_starts):
            return table
    return None
