"""The tokenizer `sentencepiece`: the library's own ids, in Transformers and in ours; folders that load; word starts."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from command_line import call, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from real_data import real_data
from selection import at_night
from texts import write_texts
from transformers import AutoTokenizer

import terakoya
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers import mecab
from terakoya.toolkit.tokenizers.sentencepiece_folder import load_model
from terakoya_plugins.tokenizers.sentencepiece import SentencePiece
from terakoya_plugins.tokenizers.sentencepiece.words import WordBounds

TEXT = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"
LINES = [line for line in TEXT.read_text(encoding="utf-8").split("\n") if line][:120]

HARD = [
    "",
    " ",
    "　　",
    "か\u3099んは\u309aる、ハ\u309aン",  # NFD kana
    "  先頭に空白",
    "a  b   c\td",
    "末尾に空白  ",
    "家族は👨‍👩‍👧‍👦です。❤️も",  # emoji with joiners
    "𠮷野家で𩸽を食べる",  # beyond the basic plane
    "前\0後ろ",
    "制御\x01\x02文字\x1f\x7f\u200b\ufeff",
    "ＡＢＣ１２３！？（ｶﾞｷﾞｸﾞ）㍻ﷺ～",
    "▁先頭▁",
    "<0x0A>と<0xE3>",
    "龘鬱[CLS]龘",
    "一行目\n\n  三行目\r\n",
    "<s>始め</s>、<unk>と<pad>、<s",
    "東京は[MASK]です。[CLS] x [SEP][PAD][UNK] [MASK]  [MASK]",
    "||||",
    "長い行。" * 2000,
]

MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"vocab_size": 1500},
    "bpe": {"vocab_size": 1500, "model_type": "bpe", "special_tokens": "bert", "user_defined_symbols": ("です", "[x]")},
    "char": {"vocab_size": 1500, "model_type": "char", "hard_vocab_limit": False, "pad_id": 3, "mask_piece": "<mask>"},
    "words": {"vocab_size": 1250, "special_tokens": "bert", "pretokenization_delimiter": "||||"},
    "seed": {
        "vocab_size": 1500,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<s>", "</s>", "<pad>", "<CLS>", "<SEP>", "<EOD>", "<MASK>", "\n"],
        "pretokenization_delimiter": "||||",
        "dictionary": "ipadic",
    },
}


def make(folder: Path, lines: Sequence[str] = LINES, **fields: Any) -> Path:
    """A small tokenizer in a new folder."""
    corpus = write_texts(folder.with_suffix(".jsonl"), lines)
    SentencePiece(**{"num_threads": 1, "vocab_size": 1500, **fields}).train(corpus, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("sentencepiece")
    return cache(lambda name: make(base / name, **MODELS[name]))


def own(folder: Path) -> SentencePiece:
    found = SentencePiece.from_folder(folder)
    assert found is not None
    return found


def flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [id for row in rows for id in row]


# ------------------------------------------------------------------------------------------------------------ ids


@pytest.mark.parametrize("name", at_night(MODELS, always=("unigram", "seed")))
def test_ids_equal_those_of_transformers_and_of_the_library(folders: Any, name: str) -> None:
    folder = folders(name)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = load_model(folder / "tokenizer.model")
    documents = [*LINES, *HARD, "\n".join(HARD)]
    lines = [line for text in documents for line in text.split("\n")]
    rows = [tokenizer(line, add_special_tokens=False).input_ids for line in lines]
    encoded = own(folder).encoder(folder).encode(documents)
    assert encoded.ids.tolist() == flat(rows)
    assert encoded.line_lengths.tolist() == [len(row) for row in rows if row]
    assert encoded.document_lines.tolist() == [
        sum(bool(tokenizer(line, add_special_tokens=False).input_ids) for line in text.split("\n"))
        for text in documents
    ]
    without_literal = [number for number, line in enumerate(lines) if not any(c in line for c in "<[")]
    assert len(without_literal) > 120
    assert [rows[number] for number in without_literal] == [model.encode(lines[number]) for number in without_literal]
    assert (encoded.word_starts is not None) == ("pretokenization_delimiter" in MODELS[name])
    as_text = own(folder).model_copy(update={"special_tokens_in_text": "split"}).encoder(folder).encode(documents)
    assert as_text.ids.tolist() == flat([model.encode(line) for line in lines])


def test_whole_documents_keep_their_line_ends(folders: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "x", user_defined_symbols=["\n"])
    documents = ["一行目。\n\n三行目<s>。\n", "", "\n".join(LINES)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in documents]
    encoded = own(folder).encoder(folder).encode(documents, whole=True)
    assert encoded.ids.tolist() == flat(rows) and encoded.document_lines.tolist() == [1, 0, 1]
    assert (encoded.ids == tokenizer.convert_tokens_to_ids("\n")).sum() == 3 + len(LINES) - 1
    words = own(folders("words")).encoder(folders("words"))  # MeCab cuts line by line
    assert words.encode(documents, whole=True).ids.tolist() == words.encode(documents).ids.tolist()


@settings(max_examples=60)
@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("▁ 　龘[MASK]<s>東\0\t"), max_size=30))
)
def test_ids_of_any_text(documents: list[str]) -> None:
    for encoder, tokenizer in _pairs():
        rows = [tokenizer(line, add_special_tokens=False).input_ids for text in documents for line in text.split("\n")]
        encoded = encoder.encode(documents)
        assert encoded.ids.tolist() == flat(rows)
        assert encoded.word_starts is None or len(encoded.word_starts) == len(encoded.ids)


@cache
def _pairs() -> list[tuple[Any, Any]]:
    import tempfile

    base = Path(tempfile.mkdtemp())
    made = [make(base / name, **MODELS[name]) for name in ("words", "seed")]
    return [(own(folder).encoder(folder), AutoTokenizer.from_pretrained(folder)) for folder in made]


def test_a_run_of_unknown_characters_that_spells_a_piece(tmp_path: Path) -> None:
    folder = make(tmp_path / "x", control_symbols=["鬱龘"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("木に鬱龘", add_special_tokens=False).input_ids
    assert ids[-1] == tokenizer.convert_tokens_to_ids("鬱龘")
    assert own(folder).encoder(folder).encode(["木に鬱龘"]).ids.tolist() == ids


def test_literals_are_counted_and_parsed_or_not(folders: Any) -> None:
    folder = folders("bpe")
    text = "寺の[MASK]と[MASK]、[SEP]。"
    parsed = own(folder).encoder(folder).encode([text])
    assert parsed.literals == {"[MASK]": 2, "[SEP]": 1}
    vocabulary = own(folder).encoder(folder).vocabulary
    assert (parsed.ids == vocabulary.mask).sum() == 2 and (parsed.ids == vocabulary.sep).sum() == 1
    split = SentencePiece(special_tokens_in_text="split").encoder(folder).encode([text])
    assert not np.isin(split.ids, [vocabulary.mask, vocabulary.sep]).any() and split.literals == parsed.literals


def test_tokens_that_strip_white_space_are_encoded_by_transformers(folders: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders("bpe"))
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken("<tag>", lstrip=True, rstrip=True, special=True)])
    tokenizer.save_pretrained(tmp_path)
    text = "寺と <tag> 子どもと[SEP]木"
    encoded = own(tmp_path).encoder(tmp_path).encode([text, "木"])
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert encoded.ids.tolist() == flat([again(line, add_special_tokens=False).input_ids for line in (text, "木")])
    assert encoded.literals == {"<tag>": 1, "[SEP]": 1}


# --------------------------------------------------------------------------------------------------------- folder


def test_the_folder_of_a_gpt_model(folders: Any) -> None:
    folder = folders("unigram")
    names = ["terakoya.json", "tokenizer.json", "tokenizer.model", "tokenizer.vocab", "tokenizer_config.json"]
    assert sorted(file.name for file in folder.iterdir()) == names
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == 1500 and tokenizer("木").input_ids == tokenizer("木", add_special_tokens=False).input_ids
    vocabulary = own(folder).encoder(folder).vocabulary
    facts = (vocabulary.size, vocabulary.unk, vocabulary.bos, vocabulary.eos, vocabulary.pad, vocabulary.cls)
    assert facts == (1500, 0, 1, 2, None, None)
    assert vocabulary.special == (0, 1, 2)
    lines = (folder / "tokenizer.vocab").read_text(encoding="utf-8").split("\n")
    assert lines[:3] == ["<unk>\t0", "<s>\t0", "</s>\t0"] and len(lines) == 1501


def test_the_folder_of_a_bert_model_adds_special_tokens(folders: Any) -> None:
    folder = folders("words")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == 1250
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pair = tokenizer("木", "寺")
    assert [pair.input_ids[0], pair.input_ids[-1]] == [2, 3] and pair.token_type_ids[-1] == 1
    masked = tokenizer("寺の[MASK]を見る", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(masked)[masked.index(4) + 1][0] == "を", "no space after [MASK]"
    vocabulary = own(folder).encoder(folder).vocabulary
    facts = (vocabulary.pad, vocabulary.unk, vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.eos)
    assert facts == (0, 1, 2, 3, 4, None)


def test_options_are_passed_to_the_trainer(folders: Any, tmp_path: Path) -> None:
    model = load_model(folders("seed") / "tokenizer.model")
    ids = [model.piece_to_id(piece) for piece in MODELS["seed"]["user_defined_symbols"]]
    assert ids == [1, 2, 3, 4, 5, 6, 7, 8] and not any(map(model.is_control, ids))
    pieces = [model.id_to_piece(id) for id in range(model.get_piece_size())]
    assert "<0xE3>" in pieces and not any(len(piece) > 1 and any(map(str.isdigit, piece)) for piece in pieces[300:])
    assert model.normalize("a  b") == "▁a▁▁b"
    folder = make(
        tmp_path / "other", eos_piece="<|end|>", eos_id=0, unk_id=3, bos_id=-1, cls_piece="<c>", vocab_size=1600
    )
    vocabulary = own(folder).encoder(folder).vocabulary
    assert (vocabulary.eos, vocabulary.unk, vocabulary.bos) == (0, 3, None) and vocabulary.cls in vocabulary.special
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|end|>"


DRAWN: dict[str, Any] = {"input_sentence_size": 60, "hard_vocab_limit": False, "character_coverage": 0.98}


@pytest.mark.parametrize("fields", at_night([{}, DRAWN, {"model_type": "bpe"}], always=[DRAWN]))
def test_same_corpus_same_bytes(tmp_path: Path, fields: dict[str, Any]) -> None:
    made = [make(tmp_path / name, **{"num_threads": 2, **fields}) for name in ("one", "two")]
    assert len({(folder / "tokenizer.model").read_bytes() for folder in made}) == 1


@pytest.mark.usefixtures("forks")
def test_the_sample_of_lines_is_the_same_in_every_process(tmp_path: Path) -> None:
    here = make(tmp_path / "here", num_threads=2, **DRAWN)
    program = (
        "from pathlib import Path; from terakoya.corpus.corpus import Corpus\n"
        "from terakoya_plugins.tokenizers.sentencepiece import SentencePiece\n"
        f"kind = SentencePiece(num_threads=2, vocab_size=1500, **{DRAWN!r})\n"
        f"kind.train(Corpus([Path({str(here.with_suffix('.jsonl'))!r})]), Path({str(tmp_path / 'there')!r}))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    one = (here / "tokenizer.model").read_bytes()
    assert one == (tmp_path / "there" / "tokenizer.model").read_bytes()
    for fields in ({"random_seed": 5}, {"shuffle_input_sentence": False}):
        assert one != (make(tmp_path / str(fields), num_threads=2, **DRAWN, **fields) / "tokenizer.model").read_bytes()
    first = make(tmp_path / "first", LINES[:60], **{**DRAWN, "input_sentence_size": 0})
    asked = make(tmp_path / "asked", **DRAWN, shuffle_input_sentence=False)
    assert (first / "tokenizer.model").read_bytes() == (asked / "tokenizer.model").read_bytes()


@pytest.mark.usefixtures("forks")
def test_training_hides_warnings_about_ignored_arguments(tmp_path: Path) -> None:
    """In a separate process, because the library has one log level for the whole process."""
    (tmp_path / "a.txt").write_text("\n\n".join(LINES), encoding="utf-8")
    given = ["tokenizer", "train", str(tmp_path / "a.txt"), "--type", "sentencepiece", "--train-extremely-large-corpus"]
    given += ["--num-threads", "1", "--out"]
    called = [sys.executable, "-m", "terakoya", *given]
    done = subprocess.run([*called, str(tmp_path / "b"), "--vocab-size", "1500"], capture_output=True, timeout=60)
    said = done.stderr.decode().splitlines()
    assert done.returncode == 0 and len(said) == 2
    assert said[0].startswith("terakoya tokenizer train: ") and said[1].startswith("next: terakoya prepare ")
    done = subprocess.run([*called, str(tmp_path / "c"), "--vocab-size", "9"], capture_output=True, timeout=60)
    error = done.stderr.decode().partition("\n")[2]
    assert done.returncode == 2 and error.startswith("error: SentencePiece's trainer: Vocabulary size is smaller")


def test_training_reads_the_documents_of_any_file_format(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    text = tmp_path / "b.txt.gz"
    text.write_bytes(gzip.compress("\n".join(LINES).encode()))
    SentencePiece(num_threads=1, vocab_size=1500).train(Corpus([text], documents="line"), tmp_path / "b")
    assert (folder / "tokenizer.model").read_bytes() == (tmp_path / "b" / "tokenizer.model").read_bytes()
    assert '{"' not in (folder / "tokenizer.vocab").read_text(encoding="utf-8")


def test_skipped_lines_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("\n\n".join([*LINES, "木" * 100, "▅ 棒"]), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "terakoya"):
        kind = SentencePiece(num_threads=1, max_sentence_length=290, hard_vocab_limit=False)
        facts = kind.train(Corpus([file]), tmp_path / "out")
    long = sum(len(line.encode()) > 290 for line in LINES) + 1
    assert (facts["too_long"], facts["reserved"], facts["lines"]) == (long, 1, len(LINES) + 1 - long)
    assert f"{long} lines of more than 290 bytes" in caplog.text and "▅" in caplog.text


# ----------------------------------------------------------------------------------------------------------- words


def test_no_piece_spans_words_in_training_and_word_starts_are_from_mecab(folders: Any) -> None:
    folder = folders("words")
    words = mecab.MecabSplitter(mecab.dictionary_options("unidic_lite"), normalize=False)
    model = load_model(folder / "tokenizer.model")
    clean = [model.normalize(line) for line in LINES]
    cut = [words.split([line.replace("▁", " ")])[0].split(" ") for line in clean]
    known = {word for line in cut for word in line}
    pieces = [model.id_to_piece(id).lstrip("▁") for id in range(5, model.get_piece_size())]
    assert all(any(piece in word for word in known) for piece in pieces)
    encoded = own(folder).encoder(folder).encode(LINES)
    assert encoded.word_starts is not None
    place = crossed = total = 0
    for line, line_words in zip(LINES, cut, strict=True):
        row = model.encode(line, out_type=str)
        begins = np.cumsum([0, *map(len, row[:-1])])
        expected = {0}
        position = 0
        for word in line_words:
            expected.add(position)
            position = model.normalize(line).replace("▁", " ").index(word, position) + len(word)
        got = encoded.word_starts[place : place + len(row)]
        assert got.tolist() == [begin in expected for begin in begins]
        crossed += len(expected - set(begins.tolist()))
        total += len(expected)
        place += len(row)
    assert crossed < 0.1 * total, "at most a few words are joined by a piece that spans both"


def test_no_word_starts_inside_a_symbol(tmp_path: Path) -> None:
    words = WordBounds(mecab.dictionary_options("unidic_lite"), symbols=["寺の木"])
    assert words.insert_delimiters("この寺の木を 見る", "|") == "この|寺の木|を| 見る"
    plain = WordBounds(mecab.dictionary_options("unidic_lite"), space_is_suffix=True)
    assert plain.insert_delimiters("この寺の木を 見る", "|") == "この|寺|の|木|を |見る"


def test_bytes_of_a_character_are_one_word(folders: Any) -> None:
    folder = folders("seed")
    encoded = own(folder).encoder(folder).encode(["木と龘と木"])
    tokens = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(encoded.ids.tolist())
    assert encoded.word_starts is not None
    first = tokens.index("<0xE9>")
    assert tokens[first : first + 3] == ["<0xE9>", "<0xBE>", "<0x98>"]
    assert encoded.word_starts[first : first + 3].tolist() == [True, False, False]


def test_a_literal_is_a_word_of_its_own(folders: Any) -> None:
    folder = folders("words")
    encoded = own(folder).encoder(folder).encode(["木の[MASK]を見る。", "[MASK]"])
    assert encoded.word_starts is not None
    at = np.flatnonzero(encoded.ids == 4)
    assert encoded.word_starts[at].all() and encoded.word_starts[at[0] + 1]


# ------------------------------------------------------------------------------------------ recognising, importing


@pytest.mark.parametrize("name", at_night(MODELS, always=("words", "seed")))
def test_from_folder_returns_the_settings(folders: Any, name: str) -> None:
    assert own(folders(name)) == SentencePiece(num_threads=1, **MODELS[name])


def test_folders_of_other_programs(folders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = (folders("unigram") / "tokenizer.model").read_bytes()
    config = tmp_path / "tokenizer_config.json"
    assert SentencePiece.from_folder(tmp_path) is None
    (tmp_path / "noise.model").write_bytes(b"no model")
    assert SentencePiece.from_folder(tmp_path) is None
    (tmp_path / "noise.model").unlink()
    (tmp_path / "spiece.model").write_bytes(model)
    with caplog.at_level(logging.WARNING, "terakoya"):
        bare = own(tmp_path)
    assert "tokenizer import" in caplog.text
    documents = [*LINES[:20], *HARD]
    ids = bare.encoder(tmp_path).encode(documents).ids.tolist()
    assert ids == SentencePiece(vocab_size=1500).encoder(folders("unigram")).encode(documents).ids.tolist()
    tokenizer = bare.load(tmp_path)
    assert ids == flat(
        [tokenizer(line, add_special_tokens=False).input_ids for text in documents for line in text.split("\n")]
    )
    for entry in ({"tokenizer_class": "T5Tokenizer"}, {"tokenizer_class": "BertGenerationTokenizer", "legacy": False}):
        config.write_text(json.dumps(entry))
        assert SentencePiece.from_folder(tmp_path) is None
    config.write_text(json.dumps({"tokenizer_class": "BertGenerationTokenizer"}))  # adds <::::> and <pad>
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    encoder = own(tmp_path).encoder(tmp_path)
    assert encoder.vocabulary.size == len(tokenizer) == 1502 and encoder.vocabulary.sep is not None
    texts = ["木<::::>寺", *documents]
    rows = [tokenizer(line, add_special_tokens=False).input_ids for text in texts for line in text.split("\n")]
    assert encoder.encode(texts).ids.tolist() == flat(rows)
    config.unlink()
    (tmp_path / "other.model").write_bytes(model)
    with pytest.raises(UserError, match=r"expected one SentencePiece model, found other\.model, spiece\.model"):
        SentencePiece.from_folder(tmp_path)


def test_a_model_is_imported(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folders("bpe") / "tokenizer.model"
    given = ["tokenizer", "import", str(file), "--type", "sentencepiece", "--out"]
    options = ["--special-tokens", "bert", "--pretokenization_delimiter", "||||"]
    code, out, _ = call(capsys, *given, tmp_path / "in", *options)
    assert code == 0 and "pieces 1,500" in out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "in", local_files_only=True)
    assert tokenizer("木").input_ids == AutoTokenizer.from_pretrained(folders("bpe"))("木").input_ids
    assert own(tmp_path / "in").encoder(tmp_path / "in").encode(["木と寺"]).word_starts is not None
    for options, message in (
        (["--mask-piece", "<none>"], "mask_piece: expected a piece of this model, got <none>"),
        (["--type", "mecab_wordpiece"], "expected a vocab.txt with one piece a line"),
    ):
        words = [*given, tmp_path / "no", *options]
        said = refusal(capsys, *(words if "--type" not in options else [*words[:3], *options, *words[5:7]]))
        assert message in said
    with pytest.raises(UserError, match="has no piece for cls, sep, mask, pad"):
        SentencePiece(special_tokens="bert").import_file(folders("unigram") / "tokenizer.model", tmp_path / "x")
    with pytest.raises(UserError, match="expected a SentencePiece model"):
        SentencePiece().import_file(TEXT, tmp_path / "x")


def check_imported(file: Path, folder: Path) -> None:
    """Ids of the model `file`, imported into `folder`, are those of Transformers and of SentencePiece itself."""
    SentencePiece().import_file(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    lines = [line for text in (*LINES, *HARD) for line in text.split("\n")]
    rows = [tokenizer(line, add_special_tokens=False).input_ids for line in lines]
    assert own(folder).encoder(folder).encode(lines).ids.tolist() == flat(rows)
    wrong = [line for line, row in zip(lines, rows, strict=True) if row != model.encode(line)]
    assert wrong == ["<s>始め</s>、<unk>と<pad>、<s"]


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 2500},
        {"model_type": "bpe", "vocab_size": 2500, "byte_fallback": True, "normalization_rule_name": "identity"},
        {
            "model_type": "unigram", "vocab_size": 2500, "byte_fallback": True, "split_digits": True,
            "add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity",
            "user_defined_symbols": ["\n", "<MASK>"],
        },
        {"model_type": "char", "vocab_size": 800, "hard_vocab_limit": False, "normalization_rule_name": "nfkc_cf"},
    ],
)  # fmt: skip
def test_models_that_sentencepiece_trained(tmp_path: Path, options: dict[str, Any]) -> None:
    sentencepiece.SentencePieceTrainer.train(
        input=str(TEXT), model_prefix=str(tmp_path / "made"), num_threads=1, minloglevel=2, **options
    )
    check_imported(tmp_path / "made.model", tmp_path / "folder")


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name",
    [
        "llm-jp-tokenizer/code10K_en20K_ja30K.ver2.2.model",
        "llm-jp-tokenizer/llm-jp-tokenizer-100k.ver3.0b1.model",
        "sentencepiece/test_ja_model.model",
        "sentencepiece/test_model.model",
    ],
)
def test_published_models(tmp_path: Path, name: str) -> None:
    check_imported(real_data(f"tokenizers/{name}"), tmp_path)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_sise": 5}, "Extra inputs"),
        ({"vocab_size": "8000"}, "valid integer"),
        ({"byte_fallback": "yes"}, "valid boolean"),
        ({"model_type": "word"}, "'unigram', 'bpe' or 'char'"),
        ({"pad_id": 2}, "expected four different ids"),
        ({"dictionary": "ipadic"}, "dictionary: MeCab is used only with pretokenization_delimiter"),
        ({"character_coverage": 1.5}, "less than or equal to 1"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SentencePiece(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 20}, "trainer: Vocabulary size is smaller than required_chars. 20 vs"),
        ({"vocab_size": 90_000}, "trainer: Vocabulary size too high"),
        ({"pretokenization_delimiter": "||||", "dictionary": "ipadik"}, 'did you mean "ipadic"'),
        ({"lines": ["  "]}, "expected at least one document that is not rejected, got 1 of 1 documents"),
        ({"lines": ["▅", "  "]}, "no line is left to train on: 1 have ▅, which it uses internally"),
        ({"lines": ["鰯" * 1398, "鯖" * 9000]}, "2 have more than 4,192 bytes; raise max_sentence_length, or"),
    ],
)
def test_trainer_errors_are_user_errors(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path / "x", **fields)


def test_a_line_that_delimiters_make_too_long_is_not_left_out(tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    lines = [*LINES[:30], "鰯鯖" * 583]
    assert not set("鰯鯖") & set("".join(LINES[:30]))
    folder = make(tmp_path / "x", lines, pretokenization_delimiter="||||", vocab_size=700, hard_vocab_limit=False)
    model = load_model(folder / "tokenizer.model")
    assert model.unk_id() not in model.encode("鰯鯖")
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    assert proto.trainer_spec.max_sentence_length == 4192


def test_a_damaged_corpus_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "half.txt.gz"
    file.write_bytes(gzip.compress("\n".join(LINES).encode())[:-20])
    with pytest.raises(UserError, match=r"half\.txt\.gz: expected a whole gzip file"):
        SentencePiece(vocab_size=1500).train(Corpus([file]), tmp_path / "x")


def test_the_fingerprint_distinguishes_models_and_dictionaries(folders: Any) -> None:
    prints = [own(folders(name)).fingerprint(folders(name)) for name in ("unigram", "words", "seed")]
    assert len({each["model"] for each in prints}) == 3
    assert "dictionary" not in prints[0] and prints[1]["dictionary"] != prints[2]["dictionary"]
    assert all(each["sentencepiece"] == sentencepiece.__version__ for each in prints)
