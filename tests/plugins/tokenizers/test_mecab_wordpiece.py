"""The tokenizer `mecab_wordpiece`: Transformers' ids on every text, the published vocabulary, folders that load."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fugashi
import ipadic
import numpy as np
import pytest
import unidic_lite
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import real_data
from texts import write_texts
from transformers import AutoTokenizer

import terakoya
from terakoya.components import EncodedDocuments, Tokenizer
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.toolkit.tokenizers import mecab
from terakoya.toolkit.tokenizers.word_counts import count_words
from terakoya.toolkit.tokenizers.word_encoder import WordEncoder
from terakoya_growth.extend import extend_tokenizer
from terakoya_plugins.tokenizers.huggingface import HuggingFace
from terakoya_plugins.tokenizers.mecab_character import MecabCharacter
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece
from terakoya_tokenizer import BertJapaneseTokenizerFast

DEMO_CORPUS = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"

TEXTS = [
    "寺子屋では、子どもたちが読み書きとそろばんを習った。",
    "朝の市場には、採れたての野菜と魚がならぶ。\n店先で値段をたずねる声がする。",
    "図書館の窓から、雨にぬれた庭の木々が見えた。ガラスに水滴が残っている。",
    "New Yorkの友人から手紙が届いた。封筒には Hello, World! と書いてあった。",
    "昭和の終わりごろ、町には小さな映画館が三つあった。今は一つも残っていない。",
    "プログラムは print という関数で文字を表示する。戻り値はない。",
    "がんばれば、きっとできる。ぱっと花が咲くように。",
    "東京と大阪を結ぶ鉄道は、毎日多くの人を運ぶ。東京を朝に出れば、昼には大阪に着く。",
] * 3

HARD = [
    "",
    " ",
    "　　",
    "か\u3099んは\u309aる、ハ\u309aン",  # NFD kana
    "家族は👨‍👩‍👧‍👦です。🏴󠁧󠁢󠁥󠁮󠁧󠁿も❤️も",  # emoji with joiners
    "𠮷野家で𩸽を食べ、𠀋と𪚲を書く。",  # beyond the basic plane
    "ＡＢＣ１２３！？（ｶﾞｷﾞｸﾞ）㍻㌔①Ⅳ…ﷺ",
    "東京は[MASK]です。[CLS]始め[SEP]",
    "[MASK]",
    "[MASK][MASK] [PAD]\u3099[UNK]　[SEP]。",
    "[unused3]と[unused12]、[mask]、[MASK",
    "［MASK］と【MASK】",
    "a\tb\u00a0c\u3000d\u2028e\u2029f\u0085g\x0bh\x0ci\rj",
    "\u200bゼロ\u200c幅\u200dの\ufeff空白\u2060",
    "制御\x01\x02文字\x1f\x7f\u0080",
    "前\0後ろ",
    "\x1b\x1b\0\x01あああ",
    "あああ東\0あ¼",
    "x" * 150,
    "ー" * 150,
    "ア" * 150,
    "長い行。" * 2000,
    "ΑΣΣ ΟΔΥΣΣΕΥΣ İstanbul ẞ ŒUVRE",
    "\r\n改行\r\n\r\n",
    "##東京 ##",
    "1,234,567円と3.14％、½と１／２",
    "한국어와 中文 และไทย العربية",
]


def reference(tokenizer: Any, documents: Sequence[str]) -> list[list[int]]:
    """The ids of every line of every document, from Transformers."""
    return [tokenizer(line, add_special_tokens=False)["input_ids"] for text in documents for line in text.split("\n")]


def check(encoded: EncodedDocuments, lines: list[list[int]]) -> None:
    assert encoded.ids.tolist() == [id for line in lines for id in line]
    assert encoded.line_lengths.tolist() == [len(line) for line in lines if line]
    assert encoded.document_lines.sum() == len(encoded.line_lengths)
    assert encoded.word_starts is not None and len(encoded.word_starts) == len(encoded.ids)


def train(folder: Path, **fields: Any) -> Path:
    """A small tokenizer in a new folder."""
    corpus = write_texts(folder.with_suffix(".jsonl"), TEXTS)
    MecabWordPiece(**{"vocab_size": 300, **fields}).train(corpus, folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer") / "small")


@pytest.fixture(scope="module")
def lower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("lower") / "small", do_lower_case=True, dictionary="ipadic")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 4,000 pieces learned from the bundled corpus."""
    folder = tmp_path_factory.mktemp("prose") / "tokenizer"
    MecabWordPiece(vocab_size=4000).train(Corpus([DEMO_CORPUS]), folder)
    return folder


@pytest.fixture(scope="module")
def tohoku() -> Path:
    return real_data("tokenizers/bert-base-japanese-v3")


# ----------------------------------------------------------------------------------------------------- the folder


def test_folder_loads_unchanged_in_transformers(trained: Path) -> None:
    assert sorted(file.name for file in trained.iterdir()) == ["terakoya.json", "tokenizer_config.json", "vocab.txt"]
    tokenizer = AutoTokenizer.from_pretrained(trained, local_files_only=True)
    assert type(tokenizer).__name__ == "BertJapaneseTokenizer"
    assert tokenizer.mecab_kwargs == {"mecab_dic": "unidic_lite"}
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{number}]" for number in range(10))]
    assert tokenizer.convert_ids_to_tokens(list(range(15))) == first
    assert tokenizer.tokenize("東京") == ["東京"]


def test_vocabulary_facts(trained: Path) -> None:
    encoder = MecabWordPiece().encoder(trained)
    vocabulary = encoder.vocabulary
    lines = (trained / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert vocabulary.size == len(lines) == 300
    assert (vocabulary.pad, vocabulary.unk, vocabulary.cls, vocabulary.sep, vocabulary.mask) == (0, 1, 2, 3, 4)
    assert vocabulary.special == tuple(range(15))


def test_dakuten_are_kept(trained: Path) -> None:
    lines = (trained / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert {"が", "ば", "ぱ", "プ"} <= {line.removeprefix("##")[0] for line in lines}


def test_training_reports_and_leaves_no_other_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[int, int]] = []
    corpus = write_texts(tmp_path / "corpus.jsonl", TEXTS)
    with caplog.at_level(logging.WARNING, "terakoya"):
        facts = MecabWordPiece(vocab_size=5000).train(
            corpus, tmp_path / "out", progress=lambda done, total: calls.append((done, total))
        )
    assert calls[-1] == (corpus.total_bytes, corpus.total_bytes)
    assert facts["documents"] == len(TEXTS) and facts["count_error"] == 0
    assert facts["pieces"] < 5000 and "instead of 5,000" in caplog.text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


def test_dictionary_by_path(tmp_path: Path) -> None:
    folder = train(tmp_path / "by path", dictionary=str(ipadic.DICDIR))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["mecab_kwargs"]["mecab_dic"] is None and ipadic.DICDIR in config["mecab_kwargs"]["mecab_option"]
    tokenizer = MecabWordPiece.from_folder(folder)
    assert tokenizer is not None and tokenizer.dictionary == ipadic.DICDIR
    check(tokenizer.encoder(folder).encode(TEXTS), reference(tokenizer.load(folder), TEXTS))
    named = train(tmp_path / "by name", dictionary="ipadic")
    assert (named / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()
    assert MecabWordPiece().fingerprint(named)["dictionary"] == MecabWordPiece().fingerprint(folder)["dictionary"]


@pytest.mark.parametrize(
    ("dictionary", "message"),
    [
        ("ipadik", 'did you mean "ipadic"'),
        ("/nowhere/dictionary", "no sys.dic"),
        ("unidic", "pip install unidic|python -m unidic download"),
    ],
)
def test_missing_dictionary_says_what_to_do(tmp_path: Path, dictionary: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path / "out", dictionary=dictionary)


def test_vocabulary_too_small_for_the_alphabet(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lower limit_alphabet"):
        train(tmp_path / "out", vocab_size=100, limit_alphabet=6129)
    train(tmp_path / "in", vocab_size=100, limit_alphabet=30)
    train(tmp_path / "default", vocab_size=100)


def test_from_folder_recognises_its_own_folders(trained: Path, lower: Path, tmp_path: Path) -> None:
    assert MecabWordPiece.from_folder(trained) == MecabWordPiece(vocab_size=300)
    assert MecabWordPiece.from_folder(lower) == MecabWordPiece(vocab_size=300, do_lower_case=True, dictionary="ipadic")
    assert MecabWordPiece.from_folder(tmp_path) is None
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    for config in (
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "other"},
        {
            "tokenizer_class": "BertJapaneseTokenizer",
            "word_tokenizer_type": "mecab",
            "subword_tokenizer_type": "character",
        },
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert MecabWordPiece.from_folder(tmp_path) is None


def test_fingerprint_depends_on_vocabulary_and_dictionary(trained: Path, lower: Path, tmp_path: Path) -> None:
    one, other = MecabWordPiece().fingerprint(trained), MecabWordPiece().fingerprint(lower)
    assert {name for name in one if one[name] != other[name]} == {"vocabulary", "tokenizer_config", "dictionary"}
    assert one["fugashi"] and one["unicode"]


# ------------------------------------------------------------------------------------------------------------ ids


@pytest.mark.parametrize("which", ["trained", "lower", "prose", pytest.param("tohoku", marks=pytest.mark.real_data)])
def test_ids_of_hard_texts(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    tokenizer = MecabWordPiece.from_folder(folder)
    assert tokenizer is not None
    encoder, slow = tokenizer.encoder(folder), tokenizer.load(folder)
    for text in [*HARD, *TEXTS[:8], "\n".join(HARD)]:
        check(encoder.encode([text]), reference(slow, [text]))
    everything = encoder.encode(HARD)
    check(everything, reference(slow, HARD))
    per_document = [sum(1 for line in reference(slow, [text]) if line) for text in HARD]
    assert everything.document_lines.tolist() == per_document
    assert everything.ids.dtype == np.uint16


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["aozora-small.val", "blend/tech.val", "blend/wiki.val"])
def test_ids_of_real_text(name: str, tohoku: Path) -> None:
    file = real_data(f"{name}.jsonl.gz")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"][:6000] for line in lines][:30]
    tokenizer = MecabWordPiece.from_folder(tohoku)
    assert tokenizer is not None
    check(tokenizer.encoder(tohoku).encode(documents), reference(tokenizer.load(tohoku), documents))


@pytest.fixture(scope="module")
def both(trained: Path) -> tuple[WordEncoder, Any]:
    return MecabWordPiece().encoder(trained), MecabWordPiece().load(trained)


@pytest.fixture(scope="module")
def both_lower(lower: Path) -> tuple[WordEncoder, Any]:
    return MecabWordPiece().encoder(lower), MecabWordPiece().load(lower)


PIECES = ["[MASK]", "[", "]", "\n", " ", "　", "\u3099", "が", "か", "東京", "ＡＢ", "#", "\0", "\u2028", "Σ", "…", "ﾊﾟ"]
ANY_TEXT = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)), max_size=12
).map("".join)


@settings(max_examples=50)
@given(documents=st.lists(ANY_TEXT, max_size=4))
def test_ids_of_any_text(documents: list[str], both: Any, both_lower: Any) -> None:
    for encoder, slow in (both, both_lower):
        check(encoder.encode(documents), reference(slow, documents))


def test_word_starts_are_mecab_words(trained: Path) -> None:
    tokenizer = MecabWordPiece()
    encoded, slow = tokenizer.encoder(trained).encode(TEXTS[:3]), tokenizer.load(trained)
    assert encoded.word_starts is not None
    expected: list[bool] = []
    for text in TEXTS[:3]:
        for line in text.split("\n"):
            for word in slow.word_tokenizer.tokenize(line):
                pieces = slow.subword_tokenizer.tokenize(word)
                expected += [True, *[False] * (len(pieces) - 1)]
    assert encoded.word_starts.tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_a_full_word_cache_is_emptied_and_gives_the_same_ids(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MecabWordPiece().encoder(trained)
    expected = encoder.encode(TEXTS)
    monkeypatch.setattr(encoder._cache, "_max_words", 20)
    monkeypatch.setattr("terakoya.toolkit.tokenizers.line_encoder.BATCH_CHARACTERS", 50)
    for _ in range(3):
        again = encoder.encode(TEXTS)
        assert again.ids.tolist() == expected.ids.tolist()
        assert again.line_lengths.tolist() == expected.line_lengths.tolist()
        assert len(encoder._cache) < 60


# --------------------------------------------------------------------------------------------- special tokens in text


@pytest.mark.parametrize("mode", ["parse", "split", "reject"])
def test_literal_special_tokens(mode: Any, trained: Path) -> None:
    text = "東京は[MASK]です。\n[CLS]東京[MASK]"
    encoded = MecabWordPiece(special_tokens_in_text=mode).encoder(trained).encode([text, "東京"])
    assert dict(encoded.literals) == {"[MASK]": 2, "[CLS]": 1}
    slow = MecabWordPiece().load(trained)
    plain = [
        slow(line, add_special_tokens=False, split_special_tokens=mode == "split")["input_ids"]
        for line in [*text.split("\n"), "東京"]
    ]
    check(encoded, plain)
    assert (4 in encoded.ids) == (mode != "split")


def test_special_tokens_that_transformers_must_find(trained: Path, tmp_path: Path) -> None:
    slow = MecabWordPiece().load(trained)
    from transformers import AddedToken

    slow.add_special_tokens({"additional_special_tokens": [AddedToken("印", single_word=True)]})
    slow.add_special_tokens({"additional_special_tokens": ["[東京]", "京]都"]}, replace_extra_special_tokens=False)
    slow.save_pretrained(tmp_path)
    tokenizer = MecabWordPiece.from_folder(tmp_path)
    assert tokenizer is not None
    encoder = tokenizer.encoder(tmp_path)
    texts = ["目印と 印 と矢印は[東京]都。", "[東京]都", "印", "[MASK]と[東京", *HARD]
    check(encoder.encode(texts), reference(tokenizer.load(tmp_path), texts))
    assert encoder.vocabulary.size == 303


@pytest.mark.parametrize("mode", ["parse", "split"])
def test_words_are_not_divided_into_added_tokens(mode: Any, trained: Path, tmp_path: Path) -> None:
    slow = MecabWordPiece().load(trained)
    slow.add_tokens(["XYZ"])
    slow.save_pretrained(tmp_path)
    tokenizer = MecabWordPiece.from_folder(tmp_path)
    assert tokenizer is not None
    encoder = tokenizer.model_copy(update={"special_tokens_in_text": mode}).encoder(tmp_path)
    text = "ＸＹＺとXYZと ｘyz"  # of full width it is no added token, and NFKC makes it a word like one
    plain = tokenizer.load(tmp_path)(text, add_special_tokens=False, split_special_tokens=mode == "split")
    check(encoder.encode([text]), [plain["input_ids"]])
    assert encoder.encode([text]).ids.tolist().count(300) == (mode == "parse")
    assert encoder.vocabulary.size == 301


# ------------------------------------------------------------------------------------------------------ MeCab's limits


def test_a_line_beyond_mecabs_limits_is_split_without_an_error(trained: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece\n"
        f"encoded = MecabWordPiece().encoder(Path({str(trained)!r})).encode(['a1' * 100_000, '東京'])\n"
        "print(len(encoded.ids), encoded.document_lines.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "is too long for MeCab" in done.stderr
    tokens, lines = done.stdout.split(maxsplit=1)
    assert 200_001 <= int(tokens) < 200_100 and lines == "[1, 1]\n"  # a word may fall on a cut


def test_a_long_line_within_mecabs_limits_is_not_split(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = "図書館の窓から、雨にぬれた庭の木々が見えた。" * 2000
    assert len(line) > 32_000
    with caplog.at_level(logging.WARNING, "terakoya"):
        check(MecabWordPiece().encoder(trained).encode([line]), reference(MecabWordPiece().load(trained), [line]))
    assert not [record for record in caplog.records if record.name == "terakoya"]


def test_options_that_change_mecabs_output_do_not_change_ids(trained: Path, tmp_path: Path) -> None:
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["mecab_kwargs"] = {"mecab_dic": None, "mecab_option": f'-d "{unidic_lite.DICDIR}" -r /dev/null -O chamame'}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = MecabWordPiece.from_folder(tmp_path)
    assert tokenizer is not None
    check(tokenizer.encoder(tmp_path).encode(TEXTS), reference(tokenizer.load(tmp_path), TEXTS))


def test_each_user_dictionary_of_a_list_counts(tmp_path: Path) -> None:
    one, two = tmp_path / "one.dic", tmp_path / "two.dic"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    before = mecab.options_fingerprint(f'-u "{one},{two}"')
    two.write_bytes(b"3")
    assert before != mecab.options_fingerprint(f'-u "{one},{two}"') != mecab.options_fingerprint(f"-u {one}")
    two.unlink()
    with pytest.raises(UserError, match=r"user dictionary .*/two\.dic: no such file"):
        mecab.options_fingerprint(f"-u {one},{two}")


WORD = "寺子屋先生"
ENTRY = f"{WORD},,,-20000,名詞,固有名詞,一般,*,*,*,テラコヤ,{WORD},{WORD},テラコヤ,{WORD},テラコヤ,固,*,*,*,*"


@pytest.mark.parametrize("kind", [MecabWordPiece, MecabCharacter])
def test_a_user_dictionary_goes_with_the_folder(
    kind: type[MecabWordPiece | MecabCharacter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its name alone, and is found there from any working directory; the folder names nothing of the builder."""
    home = tmp_path / "home of mine"
    home.mkdir()
    (home / "u.csv").write_text(ENTRY, encoding="utf-8")
    fugashi.build_dictionary(
        f'terakoya -d "{unidic_lite.DICDIR}" -u "{home}/my user.dic" -f utf8 -t utf8 "{home}/u.csv"'
    )
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": f"{WORD}が{each}"}) for each in TEXTS))
    corpus = Corpus([tmp_path / "c.jsonl"])
    size = {"vocab_size": 200} if kind is MecabWordPiece else {}
    tokenizer = kind(mecab_option=f"--userdic='{home}/my user.dic'", num_unused_tokens=0, **size)  # type: ignore[arg-type]
    tokenizer.train(corpus, home / "tokenizer")
    moved = shutil.move(home / "tokenizer", tmp_path / "moved")
    before = tokenizer.fingerprint(moved)
    shutil.rmtree(home)
    for file in ("tokenizer_config.json", "terakoya.json"):
        text = (moved / file).read_text(encoding="utf-8")
        assert str(tmp_path) not in text and "--userdic=my user.dic" in text
    monkeypatch.chdir(tmp_path)
    found = recognise_tokenizer(moved)
    assert type(found) is kind and found.fingerprint(moved) == before
    texts = [f"{WORD}の本。", *TEXTS[:2]]
    encoded = found.encoder(moved).encode(texts)
    check(encoded, reference(found.load(moved), texts))
    assert found.load(moved).word_tokenizer.tokenize(f"{WORD}の本。") == [WORD, "の", "本", "。"]
    fast = BertJapaneseTokenizerFast.from_pretrained(moved)
    assert fast(texts[0]).input_ids == found.load(moved)(texts[0]).input_ids
    if kind is MecabWordPiece:
        extend_tokenizer(moved, tmp_path / "extended", [tmp_path / "c.jsonl"], add=1, processes=1)
        assert (tmp_path / "extended/my user.dic").read_bytes() == (moved / "my user.dic").read_bytes()
    monkeypatch.chdir(moved)  # where Transformers itself looks
    assert AutoTokenizer.from_pretrained(moved)(texts[0]).input_ids == fast(texts[0]).input_ids


def test_two_user_dictionaries_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number in "12":
        (tmp_path / number).mkdir()
        (tmp_path / number / "user.dic").write_text(number)
    with pytest.raises(UserError, match=r"two are called user\.dic"):
        mecab.copy_user_dictionaries(f"-u {tmp_path}/1/user.dic,{tmp_path}/2/user.dic", tmp_path / "out")


NULS = ["前\0後ろ[MASK]\0中\n次の行", "\0", "東京と\n\0大阪\0を\n結ぶ", "NUL のない行", "端\0"]


@pytest.mark.parametrize("parse", ["parse", "split"])
@pytest.mark.parametrize("kind", [MecabWordPiece, HuggingFace])
def test_text_after_a_nul_is_found(trained: Path, kind: type[Tokenizer], parse: str) -> None:
    encoder = kind(special_tokens_in_text=parse).encoder(trained)  # type: ignore[call-arg]
    encoded = encoder.encode(NULS)
    assert sorted(encoded.unread) == [0, 1, 2, 4]
    first = ["\0後ろ", "\0中"] if parse == "parse" else ["\0後ろ[MASK]\0中"]
    assert [list(parts) for parts in encoded.unread.values()] == [first, ["\0"], ["\0大阪\0を"], ["\0"]]
    read = list(NULS)
    for number, parts in encoded.unread.items():
        for part in parts:
            read[number] = read[number].replace(part, "", 1)
    tokenizer = AutoTokenizer.from_pretrained(trained, local_files_only=True, split_special_tokens=parse == "split")
    assert encoded.ids.tolist() == [id for line in reference(tokenizer, read) for id in line]


def test_text_after_a_nul_is_counted_and_is_no_text_of_the_store(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_texts(tmp_path / "a.jsonl", NULS)
    told = "lines are cut at a NUL character, where MeCab stops: 12 characters are left out"
    facts = terakoya.prepare(corpus.sources, tokenizer=trained, out=tmp_path / "store", processes=1, max_rejects=1)
    assert f"5 {told}" in caplog.text
    assert facts.notes == {**facts.notes, "lines cut at a NUL": 5, "characters left out after a NUL": 12}
    read = ["前[MASK]\n次の行", "東京と\n\n結ぶ", "NUL のない行", "端"]  # the second document has no text
    sizes = TokenStore.open(tmp_path / "store").sizes
    assert sizes.tolist() == [[len(text), len(text.encode())] for text in read]
    caplog.clear()
    count_words(corpus, MecabWordPiece(vocab_size=300).splitting().splitter)
    assert "4 lines are cut at a NUL character, where MeCab stops: 18 characters are left out" in caplog.text
