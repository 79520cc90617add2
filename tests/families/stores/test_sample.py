"""A sample shows every token once, where words and tokens begin, whole characters, and the masks of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from terakoya import plugins
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya.store.writer import write_store
from terakoya_stores.commands.sample import format_coloured, format_plain
from terakoya_stores.sample import SampledToken, sample, sample_causal, sample_masked

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "寺子", "##屋", "で", "学", "##ぶ", "▁the", "。"]
VOCABULARY = Vocabulary(size=len(PIECES), pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    documents = [[[5, 6, 7, 8, 9, 11]], [[10, 5, 6]]] * 20
    words = [[[True, False, True, True, False, True]], [[True, True, False]]] * 20
    return write_store(tmp_path / "store", documents, vocabulary=VOCABULARY, word_starts=words)


def test_words_and_tokens_are_separated(store: TokenStore, tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = sample(store, tokenizer, rows=2)
    assert format_plain(first) == "寺子/屋|で|学/ぶ|。"
    assert format_plain(second) == " the|寺子/屋"
    assert [format_plain(row) for row in sample(store, tokenizer, rows=5, start=38, most_tokens=2)] == [
        "寺子/屋",
        " the|寺子",
    ]
    with pytest.raises(UserError, match="--start: expected a sequence from 0 to 39, got 40"):
        sample(store, tokenizer, rows=1, start=40)


def test_without_words_every_border_is_the_same(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    store = write_store(tmp_path / "s", [[[5, 6, 7]]], vocabulary=VOCABULARY)
    assert format_plain(sample(store, tokenizer, rows=1)[0]) == "寺子|屋|で"


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("a 寺😀b")["input_ids"]
    store = write_store(tmp_path / "s", [[[*ids, ids[2], ids[-1], ids[0]]]], vocabulary=Vocabulary(size=len(alphabet)))
    shown = sample(store, tokenizer, rows=1)[0]
    assert [(token.text, token.tokens) for token in shown[:5]] == [("a", 1), (" ", 1), ("寺", 3), ("😀", 4), ("b", 1)]
    assert [(token.text, token.tokens) for token in shown[5:]] == [("\ufffd", 1), ("b", 1), ("a", 1)]


@pytest.mark.parametrize("whole_words", [True, False])
def test_the_masks_are_the_objectives(store: TokenStore, tokenizer: PreTrainedTokenizerFast, whole_words: bool) -> None:
    settings = {"layout": "stream", "whole_word_mask": whole_words, "mlm_probability": 0.5}
    objective = plugins.registry().component("objectives", "masked_lm").model_validate(settings)
    rows = sample_masked(store, tokenizer, objective, rows=3, sequence_length=32, seed=1)
    assert len(rows) == 3 and all(len(row) == 32 and row[0].text == "[CLS]" for row in rows)
    tokens = [token for row in rows for token in row]
    assert all(token.starts_word for token in tokens if token.text in ("[CLS]", "[SEP]"))
    markings = [token.marking for token in tokens]
    assert 3 * 10 <= len(markings) - markings.count("none") <= 3 * 16
    assert {token.shown for token in tokens if token.marking == "masked"} == {"[MASK]"}
    assert all(token.shown == token.text for token in tokens if token.marking == "kept")
    assert all(token.shown not in (token.text, "[MASK]") for token in tokens if token.marking == "replaced")
    predicted = [token.marking != "none" for token in tokens]
    halves = [predicted[n] != predicted[n - 1] for n, token in enumerate(tokens) if token.text in ("屋", "ぶ")]
    assert any(halves) is not whole_words
    assert rows == sample_masked(store, tokenizer, objective, rows=3, sequence_length=32, seed=1)
    assert rows != sample_masked(store, tokenizer, objective, rows=3, sequence_length=32, seed=2)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"layout": "packed"}, ["‖寺子|屋|で|学|ぶ|。→[SEP]", "‖ the|寺子|屋→[SEP]‖ the|寺子|屋→[SEP]"]),
        (
            {"layout": "packed", "append_eos": False},
            ["‖寺子|屋|で|学|ぶ→。‖ the|寺子→屋"],
        ),
        ({"layout": "stream"}, ["‖寺子|屋|で|学|ぶ|。|[SEP]‖ the→寺子", "寺子|屋|[SEP]‖寺子|屋|で|学|ぶ→。"]),
        (
            {"layout": "stream", "eod_mask_loss": True},
            ["‖寺子|屋|で|学|ぶ|。|([SEP])‖ the→寺子", "寺子|屋|([SEP])‖寺子|屋|で|学|ぶ→。"],
        ),
    ],
)
def test_causal_rows_show_documents_and_what_is_predicted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, settings: dict[str, object], rows: list[str]
) -> None:
    documents = [[[5, 6, 7, 8, 9, 11]], [[10, 5, 6]]] * 5
    store = write_store(tmp_path / "store", documents, vocabulary=VOCABULARY)
    objective = plugins.registry().component("objectives", "causal_lm").model_validate(settings)
    shown = sample_causal(store, tokenizer, objective, rows=100, sequence_length=8, seed=1)
    printed = [format_plain(row) for row in shown]
    if settings["layout"] == "packed":
        assert set(printed) >= set(rows), printed
    else:
        assert printed[:2] == rows
    assert sum(token.begins_document for row in shown for token in row) == len(documents)


def test_megatron_rows_come_in_megatrons_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    documents = [[[number % 7 + 5] * 9] for number in range(20)]
    store = write_store(tmp_path / "store", documents, vocabulary=VOCABULARY)
    objective = plugins.registry().component("objectives", "causal_lm").model_validate({"layout": "megatron"})
    shown = sample_causal(store, tokenizer, objective, rows=4, sequence_length=10, seed=1)
    order = np.random.RandomState(1)  # the published rule: documents are shuffled, then the samples
    joined = np.arange(20, dtype=np.int32)
    order.shuffle(joined)
    samples = np.arange(19, dtype=np.uint32)
    order.shuffle(samples)
    for row, sample_number in zip(shown, samples, strict=False):
        piece = PIECES[int(joined[sample_number]) % 7 + 5].removeprefix("##").replace("▁", " ")
        assert [token.text for token in row] == [piece] * 9 + ["[SEP]"]


def test_colours_show_words_and_markings() -> None:
    row = [
        SampledToken("寺子", 1, True),
        SampledToken("屋", 1, False),
        SampledToken("で", 1, True, "masked", "[MASK]"),
        SampledToken("[学]", 1, True, "replaced", "。"),
        SampledToken("\n", 1, None, "kept", "\n"),
    ]
    causal = [SampledToken("寺", 1, None, "ignored", begins_document=True), SampledToken("屋", 1, None, label="\n")]
    assert format_plain(causal) == "‖(寺)|屋→\\n" and format_coloured(causal).plain == "‖寺屋→\\n"
    assert format_plain(row) == "寺子/屋|[で→[MASK]]|[[学]→。]|[\\n→=]"
    line: Text = format_coloured(row)
    assert line.plain == "寺子屋で[学]→。\\n"
    styles = [str(span.style) for span in line.spans]
    assert len(set(styles)) == len(styles) == 6
    assert np.isin(["bold white on red", "bold white on magenta", "bold white on blue"], styles).all()
