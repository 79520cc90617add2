"""An extended tokenizer keeps every old id, and divides text as before where no new piece is in it."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import call
from tokenizer_shapes import NEW, OLD, PLAIN, SHAPES, byte_level, japanese_wordpiece
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.tokenization.train import train_tokenizer
from terakoya.toolkit.formats import transformers_folder
from terakoya.training.model.build import build_module
from terakoya.training.model.start_from import load_start_weights
from terakoya_growth.extend import extend_tokenizer


@pytest.fixture(scope="module", params=SHAPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tokenizer's folder, and that of the same one with ten more pieces."""
    home = tmp_path_factory.mktemp("extend")
    old, new = SHAPES[request.param](home / "old"), home / "new"
    (home / "corpus.txt").write_text("\n".join(NEW), encoding="utf-8")
    facts = extend_tokenizer(old, new, [home / "corpus.txt"], add=10, processes=1)
    assert 3 <= facts["new_pieces"] <= 10 and facts["tokens_after"] < facts["tokens_before"]
    assert facts["pieces"] == len(AutoTokenizer.from_pretrained(old)) + facts["new_pieces"]
    return old, new


def ends(tokenizer: Any, ids: list[int]) -> set[int]:
    """Where tokens end, in characters or bytes of their pieces."""
    return set(accumulate(len(piece.removeprefix("##")) for piece in tokenizer.convert_ids_to_tokens(ids)))


def test_old_ids_stay_and_new_pieces_are_used(folders: tuple[Path, Path]) -> None:
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    assert type(old) is type(new)
    before, after = old.get_vocab(), new.get_vocab()
    assert before.items() < after.items() and sorted(after.values()) == list(range(len(after)))
    assert old.all_special_ids == new.all_special_ids

    def ids(tokenizer: Any, text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    assert [ids(new, text) for text in PLAIN] == [ids(old, text) for text in PLAIN]
    assert new(PLAIN[0])["input_ids"] == old(PLAIN[0])["input_ids"]
    for text in NEW[:2]:
        assert len(ids(new, text)) < len(ids(old, text)) and max(ids(new, text)) >= len(before)
        assert ends(new, ids(new, text)) < ends(old, ids(old, text))
    special = old.convert_ids_to_tokens(old.all_special_ids[-1])
    assert ids(new, f"{special}寺子屋")[0] == old.all_special_ids[-1]


def test_a_model_starts_and_is_exported_with_the_new_pieces(folders: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = folders
    is_masked = "[MASK]" in AutoTokenizer.from_pretrained(old).get_vocab()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    raw: dict[str, Any] = {
        "data": {"train": ["none"], "sequence_length": 32},
        "architecture": {"type": "bert" if is_masked else "llama", **sizes, "max_position_embeddings": 32},
        "objective": {"type": "masked_lm" if is_masked else "causal_lm"},
        "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"}, "batch_size": {"-1": 4}, "max_steps": 1,
    }  # fmt: skip
    vocabularies = [recognise_tokenizer(folder).encoder(folder).vocabulary for folder in folders]
    torch.manual_seed(1)
    first = Parameters.from_dict(raw, source="test")
    transformers_folder.write(first.objective.exports(build_module(first, vocabularies[0]))[""], old, tmp_path / "old")
    start_from = {"folder": str(tmp_path / "old"), "vocabulary": "extend"}
    second = Parameters.from_dict({**raw, "start_from": start_from}, source="test")
    module = build_module(second, vocabularies[1])
    load_start_weights(second, module, vocabularies[1], new)
    transformers_folder.write(second.objective.exports(module)[""], new, tmp_path / "new")
    logits = {}
    for name in ("old", "new"):
        plain = (AutoModelForMaskedLM if is_masked else AutoModelForCausalLM).from_pretrained(tmp_path / name).eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        with torch.no_grad():
            logits[name] = plain(**tokenizer(PLAIN[0], return_tensors="pt")).logits
            assert plain(**tokenizer(NEW[0], return_tensors="pt")).logits.isfinite().all()
    size = vocabularies[0].size
    assert logits["new"].shape[-1] == vocabularies[1].size > size
    assert (logits["new"][..., :size] - logits["old"]).abs().max() <= 1e-6


def test_the_command_prints_what_it_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = byte_level(tmp_path / "old")
    (old / "terakoya_scores.json").write_text("{}")  # of the model that the tokenizer is from
    (tmp_path / "corpus.txt").write_text("\n".join(NEW), encoding="utf-8")
    words = ["tokenizer", "extend", old, "--corpus", tmp_path / "corpus.txt", "--add", 4, "--out", tmp_path / "new"]
    code, out, _ = call(capsys, *words, "--processes", 1)
    assert code == 0 and "new pieces 4, tokens before" in out
    assert not (tmp_path / "new/terakoya_scores.json").exists()


def test_what_cannot_be_extended_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(OLD), encoding="utf-8")
    characters = tmp_path / "characters"
    train_tokenizer([tmp_path / "corpus.txt"], characters, settings={"type": "mecab_character"}, processes=1)
    words = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]"))).save_pretrained(words)
    added = japanese_wordpiece(tmp_path / "added")
    (added / "added_tokens.json").write_text(json.dumps({"新語": 150}), encoding="utf-8")

    def refused(folder: Path, text: str) -> str:
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            extend_tokenizer(folder, tmp_path / "out", [tmp_path / "text.txt"], add=5, processes=1)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "got one of characters" in refused(characters, NEW[0])
    assert "got WordLevel" in refused(words, NEW[0])
    assert "no word of the corpus is new and occurs 2 times" in refused(japanese_wordpiece(tmp_path / "old"), "魚")
    message = refused(added, "\n".join(NEW))
    assert message.startswith("vocab.txt: expected") and "the folder adds tokens after its vocabulary" in message
