"""The tokenizer `huggingface`: any folder that AutoTokenizer loads, with exactly its ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertJapaneseTokenizer, BertTokenizerFast, GPT2Tokenizer, PreTrainedTokenizerFast

from terakoya.components import EncodedDocuments
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya_plugins.tokenizers.huggingface import HuggingFace

TEXTS = [
    "川べりの道を歩くと、風が麦の匂いを運んできた。",
    "The quick kettle boiled over; nobody unpacked the teacups.",
    "",
    " ",
    "[MASK]と##語 ＃＃、[UNK]\n\n\u3000全角　空白\r\n[CLS]",
    "か\u3099𠮷👨‍👩‍👧\0後ろ \u2028 end",
    "unkempt unkempt kettles " * 50,
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece(folder: Path) -> Path:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([text for text in TEXTS if "\0" not in text], trainer)
    backend.save(str(folder.with_suffix(".json")))
    BertTokenizerFast(tokenizer_file=str(folder.with_suffix(".json"))).save_pretrained(folder)
    return folder


def byte_level(folder: Path) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def slow(folder: Path) -> Path:
    folder.mkdir()
    pieces = [*SPECIAL, *sorted({character for text in TEXTS for character in text if character.isprintable()})]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    arguments: dict[str, Any] = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "character"}
    BertJapaneseTokenizer(str(folder / "vocab.txt"), **arguments).save_pretrained(folder)
    return folder


MAKERS = {"wordpiece": wordpiece, "byte_level": byte_level, "slow": slow}


@pytest.fixture(scope="module", params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("huggingface") / request.param)


def check(encoded: EncodedDocuments, tokenizer: Any, texts: Sequence[str], **options: Any) -> None:
    rows = [
        [tokenizer(line, add_special_tokens=False, **options)["input_ids"] for line in text.split("\n")]
        for text in texts
    ]
    assert encoded.ids.tolist() == [id for text in rows for line in text for id in line]
    assert encoded.line_lengths.tolist() == [len(line) for text in rows for line in text if line]
    assert encoded.document_lines.tolist() == [sum(1 for line in text if line) for text in rows]


def test_ids_equal_those_of_the_loaded_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFace.from_folder(folder)
    assert tokenizer is not None
    monkeypatch.setattr("terakoya.toolkit.tokenizers.line_encoder.BATCH_LINES", 3)
    check(tokenizer.encoder(folder).encode(TEXTS), tokenizer.load(folder), TEXTS)
    nothing = tokenizer.encoder(folder).encode([])
    assert nothing.ids.size == 0 and nothing.document_lines.size == 0


@pytest.mark.parametrize("mode", ["parse", "split", "reject"])
def test_literal_special_tokens(mode: Any, tmp_path: Path) -> None:
    here = wordpiece(tmp_path / "w")
    encoded = HuggingFace(special_tokens_in_text=mode).encoder(here).encode(TEXTS)
    assert dict(encoded.literals) == {"[MASK]": 1, "[UNK]": 1, "[CLS]": 1}
    check(encoded, HuggingFace().load(here), TEXTS, split_special_tokens=mode == "split")
    assert (4 in encoded.ids) == (mode != "split")


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "b": 99_999_999}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"expected ids below about 3, the number of its pieces, got 99,999,999"):
        HuggingFace().encoder(tmp_path)


def test_words_are_known_only_for_wordpiece(folder: Path) -> None:
    encoded = HuggingFace().encoder(folder).encode(["unpack ovens! [MASK][MASK]"])
    if folder.name != "wordpiece":
        assert encoded.word_starts is None
        return
    assert encoded.word_starts is not None
    pieces = HuggingFace().load(folder).convert_ids_to_tokens(encoded.ids.tolist())
    expected = [not piece.startswith("##") for piece in pieces]
    assert encoded.word_starts.tolist() == expected
    assert sum(expected) == 5 and len(expected) > 5


def test_a_hash_mark_in_the_text_is_a_word(tmp_path: Path) -> None:
    """`##` in the text is two words of punctuation, though its piece may look like the inside of a word."""
    encoded = HuggingFace().encoder(wordpiece(tmp_path / "w")).encode(["##語"])
    assert encoded.word_starts is not None and encoded.word_starts.all()


def test_vocabulary_facts(folder: Path) -> None:
    loaded, vocabulary = HuggingFace().load(folder), HuggingFace().encoder(folder).vocabulary
    assert vocabulary.size == len(loaded)
    for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        assert getattr(vocabulary, name) == getattr(loaded, f"{name}_token_id"), name
    assert set(vocabulary.special) == set(loaded.all_special_ids)
    assert vocabulary.special


def test_a_long_line_is_not_cut_and_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = wordpiece(tmp_path / "w")
    config = json.loads((here / "tokenizer_config.json").read_text())
    (here / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 8}))
    encoded = HuggingFace().encoder(here).encode(["unkempt " * 100])
    assert encoded.line_lengths.tolist()[0] >= 100
    assert not caplog.records


def test_is_chosen_only_if_no_other_kind_reads_the_folder(folder: Path, tmp_path: Path) -> None:
    assert isinstance(recognise_tokenizer(folder), HuggingFace)
    assert isinstance(recognise_tokenizer(folder, type="huggingface"), HuggingFace)
    japanese = tmp_path / "japanese"
    japanese.mkdir()
    (japanese / "vocab.txt").write_text("\n".join([*SPECIAL, "雨"]) + "\n", encoding="utf-8")
    BertJapaneseTokenizer(str(japanese / "vocab.txt"), word_tokenizer_type="mecab").save_pretrained(japanese)
    assert HuggingFace.from_folder(japanese) is not None
    assert type(recognise_tokenizer(japanese)).__name__ == "MecabWordPiece"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{broken"),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", '{"tokenizer_class": "BertTokenizer"}'),
        ("tokenizer_config.json", '{"tokenizer_class": "NoSuchTokenizer"}'),
        ("README.md", ""),
    ],
)
def test_folders_that_do_not_load(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert HuggingFace.from_folder(tmp_path) is None
    with pytest.raises(UserError):
        HuggingFace().load(tmp_path)


def test_fingerprint_depends_on_the_files(tmp_path: Path) -> None:
    here = wordpiece(tmp_path / "w")
    before = HuggingFace().fingerprint(here)
    assert before == HuggingFace().fingerprint(here) and "tokenizer.json" in before
    (here / "tokenizer.json").write_text((here / "tokenizer.json").read_text() + "\n")
    after = HuggingFace().fingerprint(here)
    assert {name for name in before if before[name] != after[name]} == {"tokenizer.json"}


def test_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("雨")
    with pytest.raises(UserError, match="trained already"):
        HuggingFace().train(Corpus([tmp_path / "a.txt"]), tmp_path / "out")


def test_a_tokenizer_that_transformers_5_saved_as_one_file_is_read(tmp_path: Path) -> None:
    """GPT-2's class lists vocab.json and merges.txt alone, and saves neither."""
    letters = {chr(code): number for number, code in enumerate(range(97, 123))}
    (tmp_path / "vocab.json").write_text(json.dumps({**letters, "ab": 26, "<|endoftext|>": 27}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    original = GPT2Tokenizer.from_pretrained(tmp_path, local_files_only=True)
    original.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "vocab.json").exists()
    loaded = HuggingFace.from_folder(tmp_path / "saved")
    assert loaded is not None
    assert loaded.load(tmp_path / "saved")("abc")["input_ids"] == original("abc")["input_ids"] == [26, 2]
    assert "tokenizer.json" in loaded.fingerprint(tmp_path / "saved")
