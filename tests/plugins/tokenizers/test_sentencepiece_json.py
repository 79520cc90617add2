"""The tokenizer.json of a SentencePiece model: the model's own ids and exact offsets; where it cannot, the encoder of
`prepare` follows it."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import real_data
from test_sentencepiece import HARD, LINES, flat, make, own
from transformers import AutoTokenizer

from terakoya.corpus.corpus import Corpus, Document
from terakoya.toolkit.tokenizers.sentencepiece_folder import load_model
from terakoya_plugins.tokenizers.sentencepiece.tokenizer_json import (
    EXACT,
    Divergence,
    NotConvertibleError,
    build_backend,
    round_scores,
)

KINDS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "unigram, bytes, bert": {"byte_fallback": True, "special_tokens": "bert"},
    "bpe": {"model_type": "bpe"},
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nfkc"},
    "bpe, as it is": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "characters": {"model_type": "char", "hard_vocab_limit": False, "special_tokens": "bert"},
}
SAME = [
    *(
        "",
        " ",
        "　",
        "▁",
        " ▁ 木 ▁",
        "ｶﾞｽとﾊﾟﾝ、ｳﾞｧ",
        "か\u3099んは\u309a",
        "～から〜まで~",
        "㍿㋿㌔①Ⅳﷺ…",
        "２０２６年１１月",
    ),
    *("......", "給.........", "を×××××に", "wwwwwwwwwww", "ーーーーーーー", "ああああああああ", "木木木木木 木木木"),
    *(
        "👨‍👩‍👧‍👦です。❤️も🇯🇵",
        "𠮷野家で𩸽を食べる",
        "a\u200bb\ufeffc\u00a0d\te",
        "한글 café naïve ﬁ",
        "<0x0A",
        "龘鬱龘",
        "é e\u0301",
    ),
]
ODD = [
    "q\u0307\u0323る",
    "か\x01\u3099",
    "＜ｓ＞と［ＭＡＳＫ］、＜０ｘ０Ａ＞",
    "\U00010781は",
    "ᄀ\u1161\u11a8 \u3099",
    "a\0b",
]
"""Texts that the library normalises otherwise than SentencePiece, or in which normalisation makes a special token."""


@cache
def folder_of(name: str) -> Path:
    import tempfile

    return make(Path(tempfile.mkdtemp()) / "tokenizer", **KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_the_models_own(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder_of(name), local_files_only=True)
    model = load_model(folder_of(name) / "tokenizer.model")
    assert tokenizer.is_fast
    texts = [*LINES, *SAME, *(text for text in HARD if not any(each in text for each in "<["))]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [text for text, row in zip(texts, rows, strict=True) if row != model.encode(text)] == []
    if "special_tokens" not in KINDS[name]:
        assert [tokenizer.decode(row) for row in rows[: len(LINES)]] == [
            model.decode(row).replace(" ⁇ ", "<unk>") for row in rows[: len(LINES)]
        ]


def test_tokens_say_which_characters_they_are() -> None:
    """A mark that joins the character before it (ｶﾞ) is left out by the library where a token ends with it."""
    tokenizer = AutoTokenizer.from_pretrained(folder_of("unigram, bytes, bert"))
    text = "ｶﾞｽ会社は㌔[MASK]　木ＡＢ龘"
    encoded = tokenizer(text, return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    covered = {at for start, stop in spans for at in range(start, stop)}
    assert covered | {1, text.index("　")} == set(range(len(text)))
    parts = dict(zip(tokens, (text[start:stop] for start, stop in spans), strict=True))
    assert parts["[MASK]"] == "[MASK]" and parts["[CLS]"] == "" and parts["木"] == "木" and parts["<0x98>"] == "龘"
    assert {part for token, part in parts.items() if token in ("キ", "キロ", "ロ")} == {"㌔"}


ANY = st.lists(
    st.sampled_from([*ODD, *SAME, "<s>", "[MASK]", "\u3099", "\u0323", "\u0301", "～", "＜", "s>", "0x0A>", "ﾞ", " "])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    max_size=8,
).map("".join)


@pytest.mark.slow
@settings(max_examples=100)
@given(text=ANY)
def test_the_encoder_of_prepare_gives_the_ids_of_transformers(text: str) -> None:
    for name in ("unigram", "unigram, bytes, bert", "bpe, bytes"):
        folder, line = folder_of(name), text.replace("\n", " ")
        tokenizer = _loaded(name)
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        assert own(folder).encoder(folder).encode([line]).ids.tolist() == ids


@cache
def _loaded(name: str) -> Any:
    return AutoTokenizer.from_pretrained(folder_of(name))


def test_odd_texts_are_found_and_others_are_not() -> None:
    folder = folder_of("unigram, bytes, bert")
    model = load_model(folder / "tokenizer.model")
    differs = Divergence(model, lambda: _loaded("unigram, bytes, bert").backend_tokenizer)
    texts = [*ODD, *SAME, *LINES]
    found = [
        texts[number] for number in differs.find(texts, [np.array(model.encode(text), np.int32) for text in texts])
    ]
    assert set(found) <= set(ODD) and ODD[0] in found and ODD[2] in found
    long = LINES[0] * 4000
    ids = np.array(model.encode(long), np.int32)
    assert differs.find(["", long], [ids[:0], ids]) == [1] and -sum(map(model.get_score, ids.tolist())) > EXACT / 2
    encoded = own(folder).encoder(folder).encode([*ODD, long], spans=True)
    assert encoded.ids.tolist() == flat(
        _loaded("unigram, bytes, bert")([*ODD, long], add_special_tokens=False)["input_ids"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_long_text_has_the_ids_of_transformers_and_is_not_read_by_it(whole: bool) -> None:
    """SentencePiece alone would round sums, so it reads parts of the text."""
    folder = folder_of("unigram")
    encoder = own(folder).encoder(folder)
    longest = encoder._differs._longest  # type: ignore[union-attr]
    odd = [*LINES, "..... ......", "  ", "ーーーーー "]
    texts = [
        glue.join(lines * (8 * longest // len(glue.join(lines)) + 1)) for glue, lines in (("\n", LINES), (" ", odd))
    ]
    expected = flat(
        _loaded("unigram")(texts if whole else "\n".join(texts).split("\n"), add_special_tokens=False)["input_ids"]
    )
    calls: list[object] = []
    encoder._load = lambda: calls.append(1) or _loaded("unigram")  # type: ignore[method-assign, func-returns-value]
    assert encoder.encode(texts, whole=whole).ids.tolist() == expected
    assert not calls


def test_scores_of_a_trained_model_add_up_exactly() -> None:
    """Without this ids of ties depend on how sums are rounded: 29 lines of 400,000."""
    model = load_model(folder_of("unigram") / "tokenizer.model")
    scores = np.array([model.get_score(id) for id in range(3, model.get_piece_size())])
    assert (scores * 256 == np.round(scores * 256)).all() and len(set(scores.tolist())) > 200


def trained(**options: Any) -> bytes:
    """A model of SentencePiece's own trainer."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, num_threads=1, minloglevel=2,
        **{"vocab_size": 1400, "hard_vocab_limit": False, **options},
    )  # fmt: skip
    return model.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "near ties differ"),
        ({"treat_whitespace_as_suffix": True}, "marks spaces otherwise"),
        ({"normalization_rule_name": "nfkc_cf"}, 'normalises by "nfkc_cf"'),
        ({"user_defined_symbols": ["です"]}, "user-defined"),
        ({"control_symbols": ["<x>"]}, "no role has the piece <x>"),
        ({"model_type": "char", "unk_piece": "unk"}, "begins with another character"),
    ],
)
def test_models_without_a_tokenizer_json_are_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    roles = {"unk": options.get("unk_piece", "<unk>"), "bos": "<s>", "eos": "</s>"}
    with pytest.raises(NotConvertibleError, match=message):
        build_backend(trained(**options), roles, cls_sep=False)
    if not options:
        assert build_backend(round_scores(trained()), roles, cls_sep=False).get_vocab_size() > 500


@pytest.mark.nightly
@pytest.mark.real_data
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_ids_of_real_text(model_type: str, tmp_path: Path) -> None:
    corpus = Corpus([real_data("ja-medium.val.jsonl.gz")])
    documents = [item.text for block in corpus.blocks() for item in corpus.read(block) if isinstance(item, Document)]
    lines = [line for text in documents for line in text.split("\n") if line]
    folder = make(tmp_path / "tokenizer", lines[::4], model_type=model_type, vocab_size=4000)
    model = load_model(folder / "tokenizer.model")
    rows = AutoTokenizer.from_pretrained(folder)(lines)["input_ids"]
    assert len(lines) > 3000
    assert [line for line, row in zip(lines, rows, strict=True) if row != model.encode(line)] == []
