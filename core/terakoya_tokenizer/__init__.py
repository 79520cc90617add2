"""Japanese BERT tokenizers with offsets: BertJapaneseTokenizer's ids over MeCab's words, as a fast tokenizer.

    import terakoya_tokenizer
    terakoya_tokenizer.register()
    tokenizer = AutoTokenizer.from_pretrained(folder)      # is_fast, return_offsets_mapping, word_ids()

Nothing here imports terakoya. `mecab`, `wordpiece`, `characters` and `word_cache` are also the encoder of `terakoya
prepare`; only `tokenization` imports Transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terakoya_tokenizer.tokenization import BertJapaneseTokenizerFast, register

__all__ = ["BertJapaneseTokenizerFast", "register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from terakoya_tokenizer import tokenization

    return getattr(tokenization, name)
