"""`word_tokenizer` of `mecab_wordpiece`: each analyser's folder loads and gives the encoder's ids."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import ids_of_lines, write_texts
from transformers import AutoTokenizer

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.toolkit.tokenizers.word_encoder import WordEncoder
from terakoya.toolkit.tokenizers.word_splitters import build_splitter, splitter_identity
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece

TEXTS = [
    "選挙管理委員会が、投票所の場所を知らせた。\n場所は小学校の体育館だった。",
    "体育館の床は、みがかれて光っていた。",
    "Crème brûlée を、カフェで食べた。It's nice!",
] * 3
HARD = [
    *TEXTS[:3],
    "",
    "　 \t ",
    "か\u3099ぎ 𠮷田 👨‍👩‍👧 ＡＢＣ㌔①…ﾊﾟ",
    "床は[MASK]。[CLS] [SEP] [MASK]",
    "##床 ##",
    "前\0後ろ\x07",
    "a\u2028b\u0085c\u00a0d\r",
    "床" * 150,
    "İstanbul ΑΣΣ ẞ",
]
pytestmark = pytest.mark.filterwarnings("ignore:Dictionary.create:DeprecationWarning")  # Transformers calls it
SUDACHI = pytest.mark.skipif(
    importlib.util.find_spec("sudachipy") is None or importlib.util.find_spec("sudachidict_core") is None,
    reason="needs sudachipy and sudachidict_core",
)
JUMAN = pytest.mark.skipif(
    importlib.util.find_spec("rhoknp") is None or shutil.which("jumanpp") is None, reason="needs rhoknp and jumanpp"
)
CASES = [
    pytest.param({"word_tokenizer": "sudachi"}, marks=SUDACHI, id="sudachi A"),
    pytest.param({"word_tokenizer": "sudachi", "sudachi_split_mode": "B"}, marks=SUDACHI, id="sudachi B"),
    pytest.param(
        {"word_tokenizer": "sudachi", "sudachi_split_mode": "C", "do_lower_case": True}, marks=SUDACHI, id="sudachi C"
    ),
    pytest.param({"word_tokenizer": "juman"}, marks=JUMAN, id="juman"),
    pytest.param({"word_tokenizer": "basic"}, id="basic"),
    pytest.param({"word_tokenizer": "basic", "do_lower_case": True}, id="basic lower"),
    pytest.param({"word_tokenizer": "none"}, id="none"),
]


def train(folder: Path, **fields: Any) -> Path:
    corpus = write_texts(folder.with_suffix(".jsonl"), TEXTS)
    MecabWordPiece(vocab_size=200, min_frequency=4, **fields).train(corpus, folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("words") / "t", **request.param), request.param


def test_ids_equal_those_of_the_loaded_folder(case: tuple[Path, dict[str, Any]]) -> None:
    folder, fields = case
    tokenizer = recognise_tokenizer(folder)
    assert tokenizer == MecabWordPiece(vocab_size=200, min_frequency=4, **fields)
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(loaded).__name__ == "BertJapaneseTokenizer"
    encoder = tokenizer.encoder(folder)
    assert isinstance(encoder, WordEncoder)
    for text in HARD:
        assert encoder.encode([text]).ids.tolist() == ids_of_lines(loaded, [text]), text
    encoded = encoder.encode(HARD)
    assert encoded.ids.tolist() == ids_of_lines(loaded, HARD)
    pieces = loaded.convert_ids_to_tokens(encoder.encode(TEXTS).ids.tolist())
    starts = encoder.encode(TEXTS).word_starts
    assert starts is not None and starts.tolist() == [not piece.startswith("##") for piece in pieces]
    assert not starts.all()


@pytest.mark.parametrize("mode", ["split", "reject"])
def test_literal_special_tokens(mode: Any, case: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = case
    text = "床は[MASK]です。 [MASK] です"
    encoded = MecabWordPiece(special_tokens_in_text=mode).encoder(folder).encode([text])
    loaded = MecabWordPiece().load(folder)
    assert encoded.ids.tolist() == ids_of_lines(loaded, [text], split_special_tokens=mode == "split")
    assert dict(encoded.literals) == {"[MASK]": 2}


@settings(max_examples=20)
@given(text=st.text(st.one_of(st.sampled_from("床ABcé 　#[MASK]\u3099…Σİ"), st.characters(exclude_categories=["Cs"]))))
def test_ids_of_any_text(case: tuple[Path, dict[str, Any]], text: str) -> None:
    folder, _ = case
    encoder, loaded = MecabWordPiece().encoder(folder), MecabWordPiece().load(folder)
    assert encoder.encode([text]).ids.tolist() == ids_of_lines(loaded, [text])


@SUDACHI
@pytest.mark.parametrize("word_tokenizer", ["mecab", pytest.param("sudachi", marks=SUDACHI)])
def test_joined_emoji_are_learnt(word_tokenizer: Any, tmp_path: Path) -> None:
    """BertJapaneseTokenizer keeps the joiner U+200D, so a vocabulary without it makes [UNK] of families and jobs."""
    texts = ["👨\u200d👩\u200d👧\u200d👦と👩\u200d💻", "🏳️\u200d🌈、\ue000と\u2060木🇯🇵"] * 3
    (tmp_path / "corpus.txt").write_text("\n\n".join(texts))
    tokenizer = MecabWordPiece(word_tokenizer=word_tokenizer, vocab_size=200, min_frequency=1)
    tokenizer.train(Corpus([tmp_path / "corpus.txt"]), tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = [loaded(text, add_special_tokens=False).input_ids for text in texts]
    assert loaded.unk_token_id not in {id for row in rows for id in row}
    assert tokenizer.encoder(tmp_path / "out").encode(texts).ids.tolist() == [id for row in rows for id in row]


def test_sudachis_modes_split_differently() -> None:
    cuts = []
    for mode in "ABC":
        config = {"word_tokenizer_type": "sudachi", "sudachi_kwargs": {"sudachi_split_mode": mode}}
        cuts.append(build_splitter(config).split(["選挙管理委員会"])[0].split(" "))
    assert len(cuts[0]) > len(cuts[1]) >= len(cuts[2]) == 1


@SUDACHI
def test_a_line_beyond_sudachis_limit_is_split_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = MecabWordPiece().encoder(train(tmp_path / "t", word_tokenizer="sudachi"))
    long = encoder.encode(["床は光る。" * 4000])
    assert "is too long for the word splitter" in caplog.text
    assert len(long.ids) == pytest.approx(4000 * len(encoder.encode(["床は光る。"]).ids), rel=0.01)


@SUDACHI
def test_fingerprint_names_the_dictionary(tmp_path: Path) -> None:
    one = MecabWordPiece().fingerprint(train(tmp_path / "a", word_tokenizer="sudachi"))
    two = MecabWordPiece().fingerprint(train(tmp_path / "b", word_tokenizer="sudachi", sudachi_split_mode="C"))
    assert {"sudachipy", "sudachi dictionary"} <= set(one)
    assert one["sudachi"] != two["sudachi"]


STAND_IN = """#!{python}
import sys
if "--version" in sys.argv:
    print("Juman++ Version: 2.0.0 / Dictionary: none")
    sys.exit()
for line in sys.stdin:
    text = line[:-1]
    if len(text) > 2 and text.startswith("# "):
        continue
    if text == "止まれ":
        sys.exit(1)
    if len(text.encode()) > 4096:
        text = ""
    for word in text.split():
        for character in word:
            print(character, character, character, "名詞 6 普通名詞 1 * 0 * 0 NIL")
    print("EOS", flush=True)
"""


@pytest.fixture(params=[pytest.param("the program", marks=JUMAN), "a stand-in"])
def juman(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Juman++ itself, or a stand-in without a dictionary that answers, and stops answering, like Juman++ 2."""
    pytest.importorskip("rhoknp", reason="needs rhoknp")
    if request.param == "a stand-in":
        program = tmp_path / "bin" / "jumanpp"
        program.parent.mkdir()
        program.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        monkeypatch.setenv("PYTHONUTF8", "1")
    return str(request.param)


@pytest.mark.parametrize(
    ("line", "same"),
    [("# 床は光る", "#床は光る"), ("＃　# 床", "##床"), ("#", "#"), ("#床", "#床"), ("床 # 光", "床#光"), ("# ", "#")],
)
def test_a_line_that_juman_reads_as_a_comment_has_words(juman: str, line: str, same: str) -> None:
    words = build_splitter({"word_tokenizer_type": "jumanpp"})
    assert "".join(words.split([line])[0].split()) == same


def test_a_line_beyond_jumans_limit_is_split_with_a_warning(juman: str, caplog: pytest.LogCaptureFixture) -> None:
    words = build_splitter({"word_tokenizer_type": "jumanpp"})
    line = "床は光る。" * 273 + "c"
    assert len(line.encode()) == 4096
    assert "".join(words.split([line])[0].split()) == line and not caplog.text
    assert "".join(words.split([line + line])[0].split()) == line + line
    assert "is too long for the word splitter" in caplog.text


def test_fingerprint_names_jumans_version(juman: str) -> None:
    facts = splitter_identity({"word_tokenizer_type": "jumanpp"})
    assert facts["jumanpp version"].startswith("Juman++ Version: 2")


@pytest.mark.parametrize("juman", ["a stand-in"], indirect=True)
def test_a_line_without_an_answer_from_juman_is_reported(juman: str) -> None:
    words = build_splitter({"word_tokenizer_type": "jumanpp"})
    with pytest.raises(UserError, match=r"got none for the line '止まれ'.*remove the line from the corpus"):
        words.split(["止まれ"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"word_tokenizer": "spacy"}, "no folder that AutoTokenizer loads"),
        ({"word_tokenizer": "none", "do_lower_case": True}, "do_lower_case: expected false"),
    ],
)
def test_settings_that_no_folder_supports_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path / "t", **fields)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(("name", "module"), [("sudachi", "sudachipy"), ("juman", "rhoknp")])
def test_missing_analysers_are_named(name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: None if each == module else find(each))
    with pytest.raises(UserError, match=f"{module} is not installed; run: pip install {module}"):
        train(tmp_path / "t", word_tokenizer=name)
