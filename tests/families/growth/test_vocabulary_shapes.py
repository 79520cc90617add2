"""Vocabularies of published shapes replace one another: MeCab with WordPiece, a unigram model, byte-level BPE."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizer_shapes import NEW, OLD, SHAPES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.toolkit.formats import transformers_folder
from terakoya.training.model.build import build_module
from terakoya.training.model.start_from import load_start_weights
from terakoya_growth.extend import extend_tokenizer

JAPANESE = [text for text in OLD if not text.isascii()]
WORDS = sorted({text[at : at + size] for text in JAPANESE for at in range(len(text)) for size in (1, 2, 3, 4)})
"""Every string of one to four characters that the tokenizers have seen, in a script without spaces: where there are
spaces, a piece and the same one after a space are two."""
PUBLISHED = ("Tohoku", "llm-jp", "Qwen")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("shapes")
    return {name: SHAPES[name](home / name) for name in PUBLISHED}


def parameters(**further: Any) -> Parameters:
    raw: dict[str, Any] = {
        "data": {"train": ["none"], "sequence_length": 32},
        "architecture": {
            "type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 32,
        },
        "objective": {"type": "causal_lm"}, "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
        "batch_size": {"-1": 4}, "max_steps": 1, **further,
    }  # fmt: skip
    return Parameters.from_dict(raw, source="test")


def vocabulary_of(folder: Path) -> Vocabulary:
    vocabulary: Vocabulary = recognise_tokenizer(folder).encoder(folder).vocabulary
    return vocabulary


def save_model(folder: Path, tokenizer: Path, vocabulary: Vocabulary) -> PreTrainedModel:
    """A model with rows that differ from one another, in `folder` with `tokenizer`."""
    torch.manual_seed(5)
    made = parameters()
    model = made.objective.exports(build_module(made, vocabulary))[""]
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.1)
    transformers_folder.write(model, tokenizer, folder)
    return model.eval()


def start(folder: Path, tokenizer: Path, change: str, initializer: str) -> PreTrainedModel:
    """The model of `folder` with the vocabulary of `tokenizer`."""
    made = parameters(start_from={"folder": str(folder), "vocabulary": change, "initializer": initializer})
    vocabulary = vocabulary_of(tokenizer)
    module = build_module(made, vocabulary)
    load_start_weights(made, module, vocabulary, tokenizer)
    return made.objective.exports(module)[""].eval()


def split(tokenizer: Any, word: str) -> tuple[int, ...]:
    """The ids of `word`, without the space that a unigram model puts before a text; empty where a part is unknown."""
    ids = [int(id) for id in tokenizer(word, add_special_tokens=False)["input_ids"]]
    if ids and tokenizer.convert_ids_to_tokens(ids[0]) == "▁":
        ids = ids[1:]
    return () if tokenizer.unk_token_id in ids else tuple(ids)


def embeddings(model: PreTrainedModel) -> Tensor:
    rows: Tensor = model.get_input_embeddings().weight.detach()
    return rows


@pytest.mark.parametrize(("one", "other"), [*permutations(PUBLISHED, 2)])
def test_a_model_takes_a_tokenizer_of_another_shape(
    one: str, other: str, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    old = save_model(tmp_path / "old", tokenizers[one], vocabulary_of(tokenizers[one]))
    new = start(tmp_path / "old", tokenizers[other], "transplant", "mean_of_pieces")
    before, after = (AutoTokenizer.from_pretrained(tokenizers[name]) for name in (one, other))
    divided = {word: (split(before, word), split(after, word)) for word in WORDS}
    single = {word: (ids[0], pieces[0]) for word, (ids, pieces) in divided.items() if len(ids) == len(pieces) == 1}
    several = {word: each for word, each in divided.items() if len(each[0]) > 1 and len(each[1]) == 1}
    assert len(single) >= 8 and len(several) >= 1
    for word, (id, piece) in single.items():
        assert torch.equal(embeddings(new)[piece], embeddings(old)[id]), word
    for word, (ids, pieces) in several.items():
        assert torch.allclose(embeddings(new)[pieces[0]], embeddings(old)[list(ids)].mean(0), atol=1e-6), word
    ids, pieces = torch.tensor(sorted(single.values())).T
    with torch.no_grad():
        logits = [model(input_ids=row[None, :24]).logits[0] for model, row in ((old, ids), (new, pieces))]
    assert (logits[1][:, pieces] - logits[0][:, ids]).abs().max() <= 1e-6


@pytest.mark.parametrize("change", ["extend", "transplant"])
def test_rows_of_no_piece_are_left_out(change: str, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    """Qwen's models have more rows than its tokenizer has pieces."""
    source = tokenizers["Qwen"]
    vocabulary = vocabulary_of(source)
    pieces = len(AutoTokenizer.from_pretrained(source))
    model = save_model(tmp_path / "old", source, vocabulary.model_copy(update={"size": pieces + 61}))
    with torch.no_grad():
        embeddings(model)[pieces:] += 1000.0
    transformers_folder.write(model, source, tmp_path / "old")
    (tmp_path / "corpus.txt").write_text("\n".join(NEW), encoding="utf-8")
    extend_tokenizer(source, tmp_path / "longer", [tmp_path / "corpus.txt"], add=10, processes=1)
    target = tmp_path / "longer" if change == "extend" else tokenizers["llm-jp"]
    new = start(tmp_path / "old", target, change, "mean_of_all")
    size = vocabulary_of(target).size
    assert new.config.vocab_size == size == len(embeddings(new)) and embeddings(new).abs().max() < 10
    mean = embeddings(model)[:pieces].mean(0)
    if change == "extend":
        assert torch.equal(embeddings(new)[:pieces], embeddings(model)[:pieces])
        assert size > pieces and torch.allclose(embeddings(new)[pieces:], mean.expand(size - pieces, -1))
    else:
        assert sum(torch.allclose(row, mean) for row in embeddings(new)) >= 10
    transformers_folder.write(new, target, tmp_path / "new")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert loaded.config.vocab_size == size
