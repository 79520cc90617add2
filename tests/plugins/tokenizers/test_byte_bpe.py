"""The tokenizer `byte_bpe`: the vocabulary of `tokenizers`' own training, folders that load, the same ids."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import ids_of_lines, write_texts
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, GPT2Tokenizer

from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.toolkit.tokenizers import bpe_merges as pair_merging
from terakoya.toolkit.tokenizers.byte_level_bpe import document_splitter, train_byte_level_bpe
from terakoya_plugins.tokenizers.byte_bpe import ByteBpe

TEXTS = [
    "坂の上の家では、毎朝だれかが笛を吹く。\n笛の音は坂の下まで届く。",
    "The kettle sang, and the cat sang back; they'd sung before.\n\n  Twice, in fact: 1234 567.",
    "毎朝、毎晩、笛の音。ああああああああ、と息をつく。aaaaaaa aaaa aa",
]
HARD = [*TEXTS, "", " ", "　\t\r", "𠮷野👨‍👩‍👧\0\u2028か\u3099", "<|endoftext|>と<|endoftext|", "Ġ Ċ ġ \x80\xff"]
EOS = "<|endoftext|>"


def train(folder: Path, **fields: Any) -> Path:
    ByteBpe(**{"vocab_size": 330, **fields}).train(write_texts(folder.with_suffix(".jsonl"), TEXTS), folder)
    return folder


def library(lines: list[str], *, prefix: bool = False, **options: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces by id and merges from the trainer of `tokenizers`."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=prefix)
    tokenizer.train_from_iterator(lines, special_tokens=[EOS], show_progress=False, **options)
    model = json.loads(tokenizer._tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [tuple(merge) for merge in model["merges"]]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("vocab_size", "min_frequency"), [(257, 2), (300, 2), (330, 1), (2000, 3)])
def test_training_gives_the_result_of_tokenizers(prefix: bool, vocab_size: int, min_frequency: int) -> None:
    options = {"vocab_size": vocab_size, "min_frequency": min_frequency}
    counts = Counter(word for text in TEXTS for word in document_splitter(prefix)(text))
    ours = train_byte_level_bpe(counts, special_tokens=[EOS], **options)
    assert ours == library(TEXTS, prefix=prefix, **options)


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("seed", range(8))
def test_ties_and_runs_are_merged_as_by_tokenizers(seed: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few letters and few counts: there are many ties between pairs, and many pairs overlap themselves."""
    monkeypatch.setattr(pair_merging, "_FEW", few)
    draw = random.Random(seed)
    lines = ["".join(draw.choices("aab ", k=draw.randint(1, 40))) for _ in range(60)]
    counts = Counter(word for line in lines for word in document_splitter(False)(line))
    ours = train_byte_level_bpe(counts, vocab_size=340, min_frequency=1, special_tokens=[EOS])
    assert ours == library(lines, vocab_size=340, min_frequency=1)


def test_merges_of_real_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of many letters, so that one training uses both algorithms of merging."""
    draw = random.Random(5)
    words = ["".join(draw.choices("かきくけこ", weights=[5, 4, 3, 2, 1], k=draw.randint(2, 30))) for _ in range(400)]
    lines = [" ".join(draw.choices(words, k=20)) for _ in range(100)]
    counts = Counter(word for line in lines for word in document_splitter(False)(line))
    ours = train_byte_level_bpe(counts, vocab_size=700, min_frequency=2, special_tokens=[EOS])
    assert ours == library(lines, vocab_size=700, min_frequency=2)


@pytest.fixture(scope="module", params=[False, True])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("byte_bpe") / "small", add_prefix_space=request.param)


def test_the_folder_loads_and_gives_the_encoders_ids(trained: Path) -> None:
    tokenizer = recognise_tokenizer(trained)
    assert isinstance(tokenizer, ByteBpe)
    loaded = AutoTokenizer.from_pretrained(trained, local_files_only=True)
    encoded = tokenizer.encoder(trained).encode(HARD)
    assert encoded.ids.tolist() == ids_of_lines(loaded, HARD)
    assert encoded.word_starts is None and dict(encoded.literals) == {EOS: 1}
    for text in TEXTS:
        line = text.split("\n")[0]
        assert loaded.decode(loaded(line)["input_ids"]).removeprefix(" " * tokenizer.add_prefix_space) == line


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_ids_of_any_text(trained: Path, text: str) -> None:
    encoder, loaded = ByteBpe().encoder(trained), ByteBpe().load(trained)
    assert encoder.encode([text]).ids.tolist() == ids_of_lines(loaded, [text])


def test_gpt2s_own_files_give_the_same_ids(tmp_path: Path) -> None:
    folder = train(tmp_path / "t")
    gpt2 = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    assert ByteBpe().encoder(folder).encode(TEXTS).ids.tolist() == ids_of_lines(gpt2, TEXTS)


@pytest.mark.parametrize("mode", ["parse", "split", "reject"])
def test_literal_special_tokens(mode: Any, trained: Path) -> None:
    encoded = ByteBpe(special_tokens_in_text=mode).encoder(trained).encode([f"笛{EOS}音"])
    assert (0 in encoded.ids) == (mode != "split")
    assert encoded.ids.tolist() == ids_of_lines(
        ByteBpe().load(trained), [f"笛{EOS}音"], split_special_tokens=mode == "split"
    )


def test_named_special_tokens_come_first(tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    folder = train(tmp_path / "t", vocab_size=290, **names, eos_token="</s>", additional_special_tokens=["<user>"])
    vocabulary = ByteBpe().encoder(folder).vocabulary
    assert (vocabulary.eos, vocabulary.bos, vocabulary.pad, vocabulary.mask) == (0, 1, 2, 3)
    assert vocabulary.special == (0, 1, 2, 3, 4) and vocabulary.size == 290
    loaded = ByteBpe().load(folder)
    assert loaded("<user>")["input_ids"] == [4] and loaded.pad_token == "<pad>"


def test_same_files_for_any_number_of_processes(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "corpus.jsonl", [f"{text}第{number}回" for number in range(400) for text in TEXTS])
    for processes in (1, 2):
        ByteBpe(vocab_size=310).train(corpus, tmp_path / str(processes), processes=processes)
    names = sorted(file.name for file in (tmp_path / "1").iterdir())
    assert names == ["merges.txt", "terakoya.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_fingerprint_depends_on_the_vocabulary(tmp_path: Path) -> None:
    one, two = train(tmp_path / "one"), train(tmp_path / "two", vocab_size=280)
    assert ByteBpe().fingerprint(one) == ByteBpe().fingerprint(one)
    different = {
        name for name, value in ByteBpe().fingerprint(one).items() if ByteBpe().fingerprint(two)[name] != value
    }
    assert different == {"tokenizer.json"}
