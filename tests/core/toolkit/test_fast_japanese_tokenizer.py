"""The fast tokenizer of `terakoya_tokenizer`: BertJapaneseTokenizer's ids, the library's encodings, exact offsets."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import random
import runpy
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import real_data
from transformers import (
    AddedToken,
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    pipeline,
)
from transformers import BertJapaneseTokenizer as Slow
from transformers.models.auto import tokenization_auto

import terakoya
from terakoya.toolkit.formats.transformers_folder import CODE
from terakoya_tokenizer import BertJapaneseTokenizerFast as Fast
from terakoya_tokenizer import normalization, register
from terakoya_tokenizer.encodings import PlainEncoding
from terakoya_tokenizer.spans import SpanEncoder
from terakoya_tokenizer.word_cache import LINE_END, WordCache
from terakoya_tokenizer.wordpiece import Pieces

CORPUS = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "東京",
    "京都",
    "がん",
    "図書",
    "ガス",
    "会社",
    "平成",
    "キロ",
    "New",
    "York",
    "読み",
    "書き",
    "です",
    "##る",
]
HARD = [
    "",
    " ",
    "\n",
    "東京は[MASK]です。[CLS]始め[SEP]",
    "[MASK][MASK] [PAD]\u3099[UNK]　[SEP]。",
    "ＡＢＣ１２３！？（ｶﾞｷﾞｸﾞ）㍻㌔①Ⅳ…ﷺ ｶﾞｽ会社",
    "か\u3099んは\u309aる、ハ\u309aン\u0301\u0323\u0301 e\u0301\u0323",
    "한글 \u1112\u1161\u11ab \u1100\u1161",
    "𠮷野家で𩸽を食べ、𠀋と𪚲を書く。",
    "家族は👨‍👩‍👧‍👦です。❤️も New York  a\tb\u3000c\u00a0d\n二行目\r\n三行目",
    "前\0後ろ[MASK]\0中",
    "İSTANBUL ΣΑΣ Ǆ ﬁ ß",
    "図書" * 60 + "x" * 120,
    "制御\x01\x02文字\x1f\x7f\u0080\u200b\ufeff",
]  # fmt: skip


def write_folder(folder: Path, **settings: Any) -> Path:
    """A folder in the shape of tohoku-nlp's, with the characters of the bundled corpus and a few words."""
    text = unicodedata.normalize("NFKC", CORPUS.read_text(encoding="utf-8"))
    characters = sorted(set(text) - set(" \n"))[:900]
    whole = settings.get("subword_tokenizer_type", "wordpiece") == "wordpiece"
    pieces = [*SPECIAL, *WORDS, *characters, *(f"##{each}" for each in characters)] if whole else SPECIAL + characters
    pieces = list(dict.fromkeys(pieces))
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    config = {
        "tokenizer_class": "BertJapaneseTokenizer",
        "model_max_length": 512,
        "do_lower_case": False,
        "word_tokenizer_type": "mecab",
        "subword_tokenizer_type": "wordpiece",
        "mecab_kwargs": {"mecab_dic": "unidic_lite"},
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "wordpiece": {},
    "ipadic, lower case": {"mecab_kwargs": {"mecab_dic": "ipadic"}, "do_lower_case": True, "never_split": ["New"]},
    "characters": {"subword_tokenizer_type": "character"},
    "not normalised": {"mecab_kwargs": {"mecab_dic": "ipadic", "normalize_text": False}},
    "characters, not normalised": {
        "subword_tokenizer_type": "character",
        "mecab_kwargs": {"mecab_dic": "unidic_lite", "normalize_text": False},
        "do_lower_case": True,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {kind: write_folder(root / kind.replace(" ", "_"), **settings) for kind, settings in KINDS.items()}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """Of each kind the slow and the fast tokenizer."""
    return {kind: (Slow.from_pretrained(folder), Fast.from_pretrained(folder)) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def both(loaded: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    return loaded["wordpiece"]


def parts(text: str, encoded: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Each token and its part of the text."""
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    return [(token, text[start:stop]) for token, (start, stop) in zip(tokens, encoded["offset_mapping"], strict=True)]


PIECES = [
    "[MASK]",
    "[",
    "]",
    "\n",
    " ",
    "　",
    "\u3099",
    "が",
    "か",
    "東京",
    "ＡＢ",
    "#",
    "\0",
    "İ",
    "Σ",
    "…",
    "ﾊﾟ",
    "㌔",
]
ANY_TEXT = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)), max_size=12
).map("".join)


# ------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_slow_tokenizer(kind: str, loaded: dict[str, tuple[Any, Any]]) -> None:
    slow, fast = loaded[kind]
    lines = CORPUS.read_text(encoding="utf-8").split("\n")[:40]
    for texts in (HARD, lines):
        for options in ({}, {"add_special_tokens": False}, {"padding": True, "pad_to_multiple_of": 8}):
            assert dict(fast(texts, **options)) == dict(slow(texts, **options))
        for text in texts[:20]:
            assert dict(fast(text)) == dict(slow(text))
            assert fast.decode(fast(text)["input_ids"]) == slow.decode(fast(text)["input_ids"])
            assert fast.tokenize(text) == slow.tokenize(text)
    assert dict(fast(HARD, split_special_tokens=True)) == dict(slow(HARD, split_special_tokens=True))


@settings(max_examples=60)
@given(text=ANY_TEXT)
def test_ids_and_spans_of_any_text(text: str, loaded: dict[str, tuple[Any, Any]]) -> None:
    for slow, fast in loaded.values():
        encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == slow(text, add_special_tokens=False)["input_ids"]
        spans = encoded["offset_mapping"]
        assert all(0 <= start < stop <= len(text) for start, stop in spans)
        assert spans == sorted(spans)
        assert encoded.word_ids() == sorted(encoded.word_ids())


@settings(max_examples=60)
@given(text=ANY_TEXT)
def test_the_span_of_a_token_is_normalised_to_the_token(text: str, both: tuple[Any, Any]) -> None:
    _, fast = both
    encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, part in parts(text, encoded, fast):
        normal = unicodedata.normalize("NFKC", part)
        piece = token.removeprefix("##") if not part.startswith("##") else token
        assert token == "[UNK]" or normal.removeprefix("##") == piece or piece in normal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ｶﾞｽ会社と①㍻", [("ガス", "ｶﾞｽ"), ("会社", "会社"), ("と", "と"), ("平成", "㍻")]),
        ("か\u3099んの図書", [("がん", "か\u3099ん"), ("の", "の"), ("図書", "図書")]),
        ("𠮷[MASK] 東京\u3000です", [("[UNK]", "𠮷"), ("[MASK]", "[MASK]"), ("東京", "東京"), ("です", "です")]),
        ("㌔[CLS]京都", [("キロ", "㌔"), ("[CLS]", "[CLS]"), ("京都", "京都")]),
    ],
)
def test_spans_of_hard_texts(text: str, expected: list[tuple[str, str]], both: tuple[Any, Any]) -> None:
    _, fast = both
    encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True)
    assert [each for each in parts(text, encoded, fast) if each[1] != "①"] == expected


def test_spans_of_letters_that_grow_in_lower_case(loaded: dict[str, tuple[Any, Any]]) -> None:
    _, fast = loaded["characters, not normalised"]
    encoded = fast("İ東", add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["offset_mapping"] == [(0, 1), (0, 1), (1, 2)]


@settings(max_examples=200)
@given(text=ANY_TEXT)
def test_normalised_characters_come_from_where_the_map_says(text: str) -> None:
    spans = normalization.nfkc_spans(text)
    normal = unicodedata.normalize("NFKC", text)
    starts, stops = spans or (list(range(len(text))), list(range(1, len(text) + 1)))
    assert len(starts) == len(stops) == len(normal)
    cuts = [at for at in range(1, len(normal)) if starts[at] >= stops[at - 1]]
    for begin, end in zip([0, *cuts], [*cuts, len(normal)], strict=True):
        if normal:
            assert unicodedata.normalize("NFKC", text[starts[begin] : stops[end - 1]]) == normal[begin:end]


@pytest.mark.nightly
def test_no_character_beyond_the_table_grows_or_joins() -> None:
    for code in range(normalization.LAST + 1, 0x110000):
        character = chr(code)
        assert len(unicodedata.normalize("NFKC", character)) == 1 and not unicodedata.combining(character)


# ------------------------------------------------------------------------------------------- the library's encodings


OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_special_tokens": False},
    {"padding": "max_length", "max_length": 40, "truncation": True},
    {"padding": True, "padding_side": "left"},
    {"padding": True, "pad_to_multiple_of": 16},
    {"truncation": True, "max_length": 7, "padding": True},
    {"truncation": True, "max_length": 9, "stride": 2, "return_overflowing_tokens": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_plain_encoding_is_the_librarys(options: dict[str, Any], both: tuple[Any, Any], monkeypatch: Any) -> None:
    _, fast = both
    wanted = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "return_token_type_ids": True}
    plain = fast(HARD, **options, **wanted)
    monkeypatch.setattr("terakoya_tokenizer.backend.MecabBackend._is_plain", lambda *_: False)
    whole = fast(HARD, **options, **wanted)
    assert any(isinstance(each, PlainEncoding) for each in plain.encodings)
    assert dict(plain) == dict(whole)
    for one, other in zip(plain.encodings, whole.encodings, strict=True):
        one = one.whole if isinstance(one, PlainEncoding) else one
        assert json.loads(one.__getstate__()) | {"overflowing": []} == json.loads(other.__getstate__()) | {
            "overflowing": []
        }


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"return_tensors": "np", "padding": True}, {"return_length": True}], ids=str
)
def test_a_batch_is_what_transformers_makes_of_its_texts(
    options: dict[str, Any], both: tuple[Any, Any], monkeypatch: Any
) -> None:
    _, fast = both
    asked = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "return_attention_mask": True}
    texts = [*HARD, "図書" * 600]
    together = fast(texts, **options, **asked)
    monkeypatch.setattr("terakoya_tokenizer.tokenization._are_texts", lambda *_: False)
    one_by_one = fast(texts, **options, **asked)
    assert list(together) == list(one_by_one)
    for name, rows in one_by_one.items():
        assert np.array_equal(together[name], rows) if "return_tensors" in options else together[name] == rows
    for number in range(len(together["input_ids"])):
        assert together.word_ids(number) == one_by_one.word_ids(number)
        assert together.tokens(number) == one_by_one.tokens(number)


def test_a_batch_with_a_text_that_is_too_long_says_so(both: tuple[Any, Any]) -> None:
    _, fast = both
    fast.deprecation_warnings.clear()
    fast(["図書", "図書" * 600], verbose=False)
    fast(["図書", "図書" * 30])
    assert not fast.deprecation_warnings
    fast(["図書", "図書" * 600])
    assert list(fast.deprecation_warnings) == ["sequence-length-is-longer-than-the-specified-maximum"]


def test_spans_stay_when_the_cache_is_cleared() -> None:
    def pieces(word: str) -> Pieces:
        return [ord(word[0])] * len(word), [0] * len(word), [1] * len(word)

    cache = WordCache(pieces, np.dtype(np.int32), max_words=3)
    found = cache.find(f"あい う {LINE_END} ")
    for word in "えおかきく":
        cache.find(f"{word} ")
    assert len(cache) <= 4
    assert found.ids[:3].tolist() == [ord("あ")] * 2 + [ord("う")] and found.line_ends.tolist() == [3]
    assert [each.tolist() for each in found.spans()] == [[0, 0, 2, 3], [1, 1, 3, 4]]
    assert found.word_numbers().tolist() == [1, 1, 2, 2] and found.word_starts().tolist() == [True, False, True, False]


class SameFactors:
    """In the place of a random generator: words of the same letters have the same hash, the first time."""

    def __init__(self) -> None:
        self._random: np.random.Generator | None = None

    def integers(self, low: int, high: int, size: int, dtype: type) -> np.ndarray:
        if self._random is None:
            self._random = np.random.default_rng(0)
            return np.zeros(size, dtype)
        return self._random.integers(low, high, size, dtype)


@pytest.mark.parametrize("many", [0, 1 << 60])
def test_words_with_the_same_hash_keep_their_tokens(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_tokenizer.word_cache._MANY", many)  # found by compiled code or by numpy
    cache = WordCache(lambda word: ([ord(word[0])], [0], [len(word)]), np.dtype(np.int32))
    monkeypatch.setattr(cache, "_random", SameFactors())
    for word in ("東京", "京東"):
        assert cache.find(f"{word} ").ids.tolist() == [ord(word[0])]
    monkeypatch.setattr(cache, "_random", SameFactors())
    cache._clear()
    for words in ("東京 大阪 ", "京東 東京 ", "阪大 大阪 京東 "):
        assert cache.encode(f"{words}{LINE_END} ")[0].tolist() == [ord(word[0]) for word in words.split()]
    assert len(cache) < 7  # the first words are new again


def test_words_that_share_a_slot_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[str] = []

    def pieces(word: str) -> Pieces:
        split.append(word)
        return [ord(each) for each in word], [0] * 2, [1] * 2

    monkeypatch.setattr("terakoya_tokenizer.word_cache._SLOT_BITS", 2)
    cache = WordCache(pieces, np.dtype(np.int32))
    words = [chr(0x3042 + number) + "る" for number in range(40)]
    for _ in range(2):
        ids, starts, lengths = cache.encode(" ".join([*words, LINE_END, ""]))
        assert ids.tolist() == [ord(each) for word in words for each in word]
        assert starts.tolist() == [True, False] * 40 and lengths.tolist() == [80]
    assert split == words  # each once


def test_spans_where_a_token_has_a_space_and_white_space_is_left_out(both: tuple[Any, Any]) -> None:
    fast = copy.deepcopy(both[1])
    fast.add_tokens(["A B"])
    text = "京\tA B京 京"
    encoded = fast(text, return_offsets_mapping=True, add_special_tokens=False)
    assert parts(text, encoded, fast) == [("京", "京"), ("A B", "A B"), ("京", "京"), ("京", "京")]


def test_pairs_and_cuts_are_those_of_the_slow_tokenizer(both: tuple[Any, Any]) -> None:
    slow, fast = both
    others = HARD[::-1]
    for options in ({}, {"truncation": "only_second", "max_length": 200}, {"padding": True, "return_tensors": "np"}):
        one, other = (each(HARD, others, return_token_type_ids=True, **options) for each in (fast, slow))
        assert {name: [list(row) for row in rows] for name, rows in one.items()} == {
            name: [list(row) for row in rows] for name, rows in other.items()
        }
    assert dict(fast(HARD, truncation=True, max_length=6)) == dict(slow(HARD, truncation=True, max_length=6))


def test_special_tokens_around_given_ids_are_those_of_the_slow_tokenizer(both: tuple[Any, Any]) -> None:
    """Transformers 4 calls these in `prepare_for_model`, which 5 does not have for fast tokenizers."""
    slow, fast = both
    for ids in ([[5, 6]], [[5, 6], [7]], [[], []]):
        for name in ("build_inputs_with_special_tokens", "create_token_type_ids_from_sequences"):
            assert getattr(fast, name)(*ids) == getattr(slow, name)(*ids)


def test_added_tokens_are_joined_without_spaces_if_asked(folders: Any) -> None:
    tokenizer = Fast.from_pretrained(folders["wordpiece"])
    tokenizer.add_tokens(["<y>", "<z>"])
    ids = tokenizer("東京<y><z>です").input_ids
    assert tokenizer.decode(ids).endswith(" <y> <z> です [SEP]")
    assert tokenizer.decode(ids, spaces_between_special_tokens=False).endswith("<y><z>です [SEP]")


def test_training_another_tokenizer_is_refused_with_the_command(both: tuple[Any, Any]) -> None:
    with pytest.raises(NotImplementedError, match="terakoya tokenizer train CORPUS --type mecab_wordpiece"):
        both[1].train_new_from_iterator([["東京"]], 100)


def test_given_words_are_the_words_of_the_tokens(both: tuple[Any, Any]) -> None:
    slow, fast = both
    words = ["ｶﾞｽ会社", "", "は", "[MASK]", "図書です"]
    encoded = fast(words, is_split_into_words=True, return_offsets_mapping=True)
    assert encoded["input_ids"] == slow(words, is_split_into_words=True)["input_ids"]
    assert encoded.word_ids() == [None, 0, 0, 2, 3, 4, 4, None]
    assert [words[word][start:stop] for word, (start, stop) in zip(
        encoded.word_ids()[1:-1], encoded["offset_mapping"][1:-1], strict=True
    )] == ["ｶﾞｽ", "会社", "は", "[MASK]", "図書", "です"]  # fmt: skip
    batch = fast([words, ["東京"]], is_split_into_words=True, padding=True)
    assert batch["input_ids"] == slow([words, ["東京"]], is_split_into_words=True, padding=True)["input_ids"]


def test_characters_and_tokens_find_each_other(both: tuple[Any, Any]) -> None:
    _, fast = both
    encoded = fast("ｶﾞｽ会社は図書です", "東京です")
    token = encoded.char_to_token(3)
    assert encoded.tokens()[token] == "会社" and tuple(encoded.token_to_chars(token)) == (3, 5)
    assert encoded.sequence_ids().count(1) == 2 and fast.is_fast
    assert tuple(fast("ｶﾞｽ会社").word_to_chars(1)) == (3, 5)


# ----------------------------------------------------------------------------------------------- folders and copies


@pytest.mark.parametrize("kind", ["wordpiece", "characters"])
def test_a_saved_folder_is_that_of_the_slow_tokenizer(kind: str, folders: Any, tmp_path: Path) -> None:
    slow, fast = Slow.from_pretrained(folders[kind]), Fast.from_pretrained(folders[kind])
    tokens = [
        AddedToken("印", single_word=True),
        "[東京]",
        AddedToken("左", lstrip=True),
        AddedToken("右", rstrip=True),
    ]
    texts = ["目印と 印 と矢印は[東京]都。", "印", "印と 印刷", "空 左 右 白　左　右　", "東京 左[MASK]右", *HARD]
    for tokenizer, name in ((slow, "slow"), (fast, "fast")):
        fast(texts)  # the encoder is made before the tokens are added
        tokenizer.add_tokens(tokens)
        tokenizer.save_pretrained(tmp_path / name)
    for name in ("vocab.txt", "added_tokens.json"):
        assert (tmp_path / "fast" / name).read_bytes() == (tmp_path / "slow" / name).read_bytes()
    mine, theirs = (json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("fast", "slow"))
    assert {name: mine[name] for name in theirs if name not in ("backend", "spm_file")} == {
        name: theirs[name] for name in theirs if name not in ("backend", "spm_file")
    }
    plain = AutoTokenizer.from_pretrained(tmp_path / "fast")
    assert type(plain) is Slow
    for again in (fast, Fast.from_pretrained(tmp_path / "fast"), Fast.from_pretrained(tmp_path / "slow")):
        assert dict(again(texts)) == dict(slow(texts)) == dict(plain(texts)) and len(again) == len(slow)
    encoded = fast(texts[0], return_offsets_mapping=True, add_special_tokens=False)
    stripped = fast("空　左　 右 　東 右", return_offsets_mapping=True, add_special_tokens=False)
    assert parts("空　左　 右 　東 右", stripped, fast)[-4:] == [("左", "左"), ("右", "右"), ("東", "東"), ("右", "右")]
    found = [each for each in parts(texts[0], encoded, fast) if each[0] in ("印", "[東京]")]
    assert all(token == part for token, part in found) and ("[東京]", "[東京]") in found


def test_saving_keeps_the_ids_of_a_vocabulary_that_has_a_piece_twice(folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_bytes((folders["wordpiece"] / "tokenizer_config.json").read_bytes())
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, "東京", "です", "東京", "は", ""]), encoding="utf-8")
    fast = Fast.from_pretrained(folder)
    fast.save_pretrained(tmp_path / "saved")
    for each in (fast, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert each("東京は")["input_ids"] == Slow.from_pretrained(folder)("東京は")["input_ids"] == [2, 7, 8, 3]


def test_copies_and_threads(both: tuple[Any, Any]) -> None:
    _, fast = both
    lines = CORPUS.read_text(encoding="utf-8").split("\n")[:60]
    expected = dict(fast(lines, return_offsets_mapping=True))
    for each in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        assert dict(each(lines, return_offsets_mapping=True)) == expected
    encoded = pickle.loads(pickle.dumps(fast(lines)))
    assert encoded.is_fast and encoded.word_ids(0) == fast(lines).word_ids(0)


def test_threads_take_turns(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Fast.from_pretrained(folders["characters"])
    fast("東京")
    encode, inside, most = SpanEncoder._encode, [0], [0]

    def counted(self: SpanEncoder, *given: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return encode(self, *given)

    monkeypatch.setattr(SpanEncoder, "_encode", counted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fast, ["東京"] * 8))
    assert most == [1]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("REGISTERED_FAST_ALIASES", "REGISTERED_TOKENIZER_CLASSES"):
        monkeypatch.setattr(tokenization_auto, table, dict(getattr(tokenization_auto, table)))
    monkeypatch.setattr(tokenization_auto.TOKENIZER_MAPPING, "_extra_content", {})
    register()


def test_auto_tokenizer_is_fast_after_registration(folders: Any, registered: None, tmp_path: Path) -> None:
    BertConfig().save_pretrained(folders["wordpiece"])  # as in the folder of a model
    for kind, folder in folders.items():
        assert type(AutoTokenizer.from_pretrained(folder)) is Fast, kind
    for model_type in ("electra", "roberta", "deberta-v2", "gpt2", "llama"):
        (folders["wordpiece"] / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert type(AutoTokenizer.from_pretrained(folders["wordpiece"])) is Fast, model_type
    basic = write_folder(tmp_path / "basic", word_tokenizer_type="basic")
    with pytest.raises(ValueError, match='got "basic"'):
        Fast(str(basic / "vocab.txt"), word_tokenizer_type="basic")
    assert type(AutoTokenizer.from_pretrained(basic)) is Slow


def test_folders_of_modernbert(registered: None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "modernbert")
    (folder / "config.json").write_text('{"model_type": "modernbert"}')
    assert type(Fast.from_pretrained(folder)) is Fast
    with pytest.raises(ValueError, match="Couldn't instantiate the backend tokenizer"):
        AutoTokenizer.from_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["auto_map"] = {"AutoTokenizer": ["tokenization.BertJapaneseTokenizer", None]}  # as exports have it
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    code = CODE.format(name="BertJapaneseTokenizer")
    (folder / "tokenization.py").write_text(code, encoding="utf-8")
    assert type(AutoTokenizer.from_pretrained(folder)) is Fast
    assert not AutoTokenizer.from_pretrained(folder, trust_remote_code=True).is_fast
    assert type(Fast.from_pretrained(folder, trust_remote_code=True)) is Fast


def test_a_script_runs_with_the_fast_tokenizer(
    folders: Any, registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom transformers import AutoTokenizer\n"
        "print(type(AutoTokenizer.from_pretrained(sys.argv[1])).__name__, len(sys.argv))\n"
    )
    tokenization_auto.REGISTERED_FAST_ALIASES.clear()
    monkeypatch.setattr("sys.argv", ["terakoya_tokenizer", str(script), str(folders["wordpiece"])])
    runpy.run_module("terakoya_tokenizer", run_name="__main__")
    assert capsys.readouterr().out == "BertJapaneseTokenizerFast 2\n"


# ------------------------------------------------------------------------------------------------------- what it is for


def test_entities_have_the_text_of_the_sentence(both: tuple[Any, Any]) -> None:
    _, fast = both
    torch.manual_seed(0)
    labels = {0: "O", 1: "B-LOC", 2: "I-LOC"}
    config = BertConfig(
        vocab_size=len(fast), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        id2label=labels, label2id={label: id for id, label in labels.items()},
    )  # fmt: skip
    model = BertForTokenClassification(config).eval()
    classes = torch.zeros(len(fast), dtype=torch.long)
    classes[fast.convert_tokens_to_ids(["東京", "ガス"])], classes[fast.convert_tokens_to_ids("会社")] = 1, 2

    def logits(input_ids: torch.Tensor, **_: Any) -> Any:
        return {"logits": 9.0 * torch.nn.functional.one_hot(classes[input_ids], 3)}

    model.forward = logits  # type: ignore[method-assign]
    found = pipeline("ner", model=model, tokenizer=fast, aggregation_strategy="simple")("ｶﾞｽ会社は\u3000東京です。")
    assert [(each["start"], each["end"], each["entity_group"]) for each in found] == [(0, 5, "LOC"), (7, 9, "LOC")]


# ----------------------------------------------------------------------------------------------------------- real text


def _gsd_sentences() -> list[str]:
    found = []
    for split in ("dev", "test"):
        file = real_data(f"eval/ud-japanese-gsd/ja_gsd-ud-{split}.conllu.gz")
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            found += [line.removeprefix("# text = ").rstrip("\n") for line in lines if line.startswith("# text = ")]
    return found


@pytest.mark.real_data
def test_spans_of_gsd_are_exact() -> None:
    """Also as half-width kana, decomposed and in full width, each of which is another text with the same words."""
    folder = real_data("tokenizers/bert-base-japanese-v3")
    slow, fast = Slow.from_pretrained(folder), Fast.from_pretrained(folder)
    sentences = _gsd_sentences()
    random.Random(0).shuffle(sentences)
    full = [unicodedata.normalize("NFKD", text) for text in sentences[:150]]
    wide = [
        "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text) for text in sentences[:150]
    ]
    for texts in (sentences, full, wide):
        encoded = fast(texts, return_offsets_mapping=True, add_special_tokens=False)
        assert encoded["input_ids"] == slow(texts, add_special_tokens=False)["input_ids"]
        for number, text in enumerate(texts):
            surfaces = unicodedata.normalize("NFKC", text)
            words = [word.surface for word in slow.word_tokenizer.mecab(surfaces)]
            for word, (start, stop), token in zip(
                encoded.word_ids(number), encoded["offset_mapping"][number], encoded.tokens(number), strict=True
            ):
                part = unicodedata.normalize("NFKC", text[start:stop])
                if token == "[UNK]":
                    assert part == words[word]
                else:
                    assert part == token.removeprefix("##") or (stop - start == 1 and token.removeprefix("##") in part)
