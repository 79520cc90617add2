"""Where SentencePiece's normalised characters come from, against the library's own positions."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sentencepiece

from terakoya_plugins.tokenizers.sentencepiece.spans import text_origins

TEXTS = [
    *("", " ", "　", "▁", "猫", " 猫", "猫 ", "▁猫", " ▁猫", "猫  と　犬", "  猫\t犬\n鳥  ", "猫▁犬"),
    *("ＡＢＣ㌔ｶﾞ", "か\u3099ん", "㌔ 猫", "…と…", "a b", "a\u0300 b", "\u200b猫\x00犬", "👨‍👩‍👧 𠮷"),
]


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["吾輩は猫である。名前はまだ無い。 a b c", "どこで 生れたか"] * 3),
        model_writer=model,
        model_type="char",
        vocab_size=40,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
        {"treat_whitespace_as_suffix": True},
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_positions_are_those_of_the_library(rule: str, options: dict[str, Any]) -> None:
    processor = train(normalization_rule_name=rule, **options)
    expected = [processor.normalize(text, with_offsets=True)[1] for text in TEXTS]
    sizes, origins = text_origins(processor, TEXTS)
    assert sizes.tolist() == [len(each) for each in expected]
    assert origins.tolist() == [place for each in expected for place in each]
