"""The whole pipeline with the key `words`: a SentencePiece vocabulary whose masks are words of MeCab."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import fugashi
import pytest
import unidic_lite
from transformers import AutoTokenizer

import terakoya
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya_pipeline.run import _Plan, read_pipeline, run_pipeline
from terakoya_plugins.word_finders.mecab import Mecab

TEXT = (Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt").read_text(encoding="utf-8")[:9_000]
KEYS: dict[str, Any] = {
    "corpus": "corpus.txt",
    "documents": "line",
    "tokenizer": {
        "type": "sentencepiece", "special_tokens": "bert", "vocab_size": 1500, "hard_vocab_limit": False,
        "character_coverage": 1.0,
    },
    "words": "mecab",
    "tokenizer_folder": "tokenizer",
    "store": "store",
    "parameters": {
        "data": {"sequence_length": 32},
        "architecture": {
            "type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 32,
        },
        "objective": {"type": "masked_lm", "whole_word_mask": True},
        "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
        "batch_size": {"-1": 2}, "max_steps": 2,
    },
    "run": "run",
    "export": "model",
    "processes": 1,
}  # fmt: skip


@pytest.mark.usefixtures("forks")
def test_masks_are_words_from_raw_text_to_the_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(TEXT, encoding="utf-8")
    Path("pipeline.json").write_text(json.dumps(KEYS), encoding="utf-8")
    results = list(run_pipeline(read_pipeline(Path("pipeline.json"))))
    assert [each.name for each in results] == ["tokenizer", "prepare", "train", "export"]

    store, tokenizer = TokenStore.open(Path("store")), AutoTokenizer.from_pretrained("model")
    mecab = fugashi.GenericTagger(f"-r /dev/null -d {unidic_lite.DICDIR}")
    compared = inside = 0
    lines = [line for line in TEXT.split("\n") if line]
    for line, begin, end in zip(lines, store.offsets, store.offsets[1:], strict=False):
        surfaces = [
            piece.removeprefix("▁") for piece in tokenizer.convert_ids_to_tokens(store.ids(begin, end).tolist())
        ]
        if "".join(surfaces) != line:
            continue  # normalised by SentencePiece, or with an unknown character: places are others
        words = set(itertools.accumulate((len(word.surface) for word in mecab(line)), initial=0))
        places = itertools.accumulate(map(len, surfaces), initial=0)
        starts = [bool(each) for each in store.word_starts(begin, end)]
        for surface, place, is_start in zip(surfaces, places, starts, strict=False):
            assert not surface or is_start == (place in words), (line, place)
        compared += len(surfaces)
        inside += starts.count(False)
    assert compared > 500 and inside > 50
    assert json.loads(Path("run/parameters.json").read_text())["objective"]["whole_word_mask"] is True
    assert tokenizer("雨[MASK]").input_ids[-2] == tokenizer.mask_token_id

    shutil.rmtree("model")
    monkeypatch.setattr("terakoya.conversion.elsewhere.PROGRAM", "raise SystemExit('no Transformers here')")
    with pytest.raises(UserError, match=r"written, but .* no Transformers here"):
        list(run_pipeline(read_pipeline(Path("pipeline.json"))))


def test_a_store_is_out_of_date_where_the_dictionary_of_its_words_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(TEXT, encoding="utf-8")
    Path("pipeline.json").write_text(json.dumps(KEYS), encoding="utf-8")
    monkeypatch.setattr(_Plan, "_tokenizer_fingerprint", {})

    def plan() -> Any:
        made = _Plan(read_pipeline(Path("pipeline.json")))
        return made._store_inputs(made.corpora[0], "train")

    inputs = plan()
    assert plan() == inputs
    monkeypatch.setattr(Mecab, "fingerprint", lambda self: {"dictionary": "another"})
    assert plan() != inputs
