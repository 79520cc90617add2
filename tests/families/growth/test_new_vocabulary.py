"""A model starts with another vocabulary than its folder's: old rows stay, and new ones are means of old ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from terakoya.components import StartModel
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.config.start_from import StartFrom
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.formats import transformers_folder
from terakoya.training.model.build import build_module
from terakoya.training.model.start_from import LoadedWeights, load_start_weights
from terakoya_contract import toy
from terakoya_growth.new_vocabulary import plan_rows, vocabulary_weights

OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked": {"type": "masked_lm"},
    "causal": {"type": "causal_lm"},
    "pretraining": {"type": "masked_lm", "layout": "pairs", "next_sentence": True},
    "discriminator": {"type": "replaced_token", "generator_size": "1/2", "sharing": "none"},
    "shared": {"type": "replaced_token", "generator_size": "1/2", "sharing": "tied"},
    "seq2seq": {"type": "span_corruption"},
}
SIZE = toy.VOCABULARY.size
NEW = ["w0w1", "w2w2w3", "鯨"]
WEIGHTS = [{"w0": 1 / 6, "w1": 1 / 3}, {"w2": 3 / 14, "w3": 4 / 14}, {}]
"""Of old rows; the mean of all makes the rest."""


def pairs() -> Iterator[tuple[str, str]]:
    """Yields each bundled architecture with each head that an objective trains."""
    for name in registry().names("architectures"):
        for head in sorted(registry().component("architectures", name).heads & OBJECTIVES.keys()):
            yield name, head
    yield "electra", "shared"


QUICK = [("bert", "masked"), ("gptj", "causal"), ("t5", "seq2seq"), ("electra", "shared")]
"""Tied heads, an untied one with a bias, an encoder-decoder, and two models with shared embeddings."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return toy.make_store(tmp_path_factory.mktemp("vocabulary"))


def words(store: TokenStore) -> list[str]:
    """The words of the toy tokenizer, by id."""
    ids = PreTrainedTokenizerFast.from_pretrained(store.tokenizer_folder).get_vocab()
    return sorted(ids, key=lambda word: ids[word])


def save_words(folder: Path, pieces: list[str], **roles: str) -> Path:
    tokenizer = Tokenizer(WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    named = {name: f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask", "bos", "eos")} | roles
    given = {f"{name}_token": piece for name, piece in named.items() if piece in pieces}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given).save_pretrained(folder)
    return folder


def parameters(store: TokenStore, architecture: str, head: str, **further: Any) -> Parameters:
    kind = registry().component("architectures", architecture)
    raw = {
        "data": {"train": [str(store.folder)], "sequence_length": toy.SEQUENCE_LENGTH},
        "architecture": {"type": architecture, **toy.settings(kind).model_dump(mode="json")},
        "objective": OBJECTIVES[head], "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
        "batch_size": {"-1": 4}, "max_steps": 1, **further,
    }  # fmt: skip
    return Parameters.from_dict(raw, source="test")


def save_models(folder: Path, made: Parameters, vocabulary: Vocabulary, tokenizer: Path) -> dict[str, PreTrainedModel]:
    """The models of an objective with weights of their own everywhere, biases too; saved as an export saves them."""
    torch.manual_seed(3)
    module = build_module(made, vocabulary)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.1 * torch.randn(value.shape))
    models = dict(made.objective.exports(module))
    for name, model in models.items():
        transformers_folder.write(model, tokenizer, folder / name)
    return models


def start(
    made: Parameters, size: int, tokenizer: Path, **special: int
) -> tuple[dict[str, PreTrainedModel], LoadedWeights]:
    vocabulary = toy.VOCABULARY.model_copy(update={"size": size, **special})
    module = build_module(made, vocabulary)
    loaded = load_start_weights(made, module, vocabulary, tokenizer)
    return dict(made.objective.exports(module)), loaded


def output(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    attention.release(model)
    further = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        made = model.eval()(input_ids=ids, **further)
    result: torch.Tensor = made["prediction_logits" if "prediction_logits" in made else "logits"]
    return result


@pytest.mark.parametrize(
    ("name", "head"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.nightly) for pair in pairs()]
)
def test_every_architecture_extends_and_transplants(name: str, head: str, store: TokenStore, tmp_path: Path) -> None:
    pieces, ids = words(store), torch.tensor([[1, 20, 31, 63, 33, 20, 2]])
    old = save_models(tmp_path / "old", parameters(store, name, head), toy.VOCABULARY, store.tokenizer_folder)
    ahead, text = pieces[: len(toy.SPECIAL)], pieces[len(toy.SPECIAL) :]
    order = [*ahead, *reversed(text), *NEW]  # every id of a text's piece changes
    for change, new in (("extend", [*pieces, *NEW]), ("transplant", order)):
        folder = save_words(tmp_path / change, new)
        start_from = {"folder": str(tmp_path / "old"), "vocabulary": change}
        models, loaded = start(parameters(store, name, head, start_from=start_from), len(new), folder)
        assert f"{SIZE} of {SIZE + 3} rows are kept, 3 are made by pieces_and_mean, 1 of them" in loaded.notes[0]
        place = torch.tensor([new.index(piece) for piece in pieces])
        for key, model in models.items():
            assert vocabulary_weights(model)
            before, after = old[key].state_dict(), model.state_dict()
            for weight in vocabulary_weights(model):
                assert torch.equal(after[weight][place], before[weight]), weight
                for piece, mean in zip(NEW, WEIGHTS, strict=True):
                    rows = [share * before[weight][pieces.index(each)].double() for each, share in mean.items()]
                    all_rows = (1 - sum(mean.values())) * before[weight].double().mean(0)
                    expected = torch.stack([*rows, all_rows]).sum(0)
                    assert torch.allclose(after[weight][new.index(piece)].double(), expected, atol=1e-6), weight
            one, two = output(old[key], ids), output(model, place[ids])
            if two.shape[-1] == len(new):  # a discriminator has none
                two = two[..., place]
            assert one.shape == two.shape and (one - two).abs().max() <= 1e-6


def test_a_piece_with_several_roles_takes_the_row_of_the_end_of_a_text(tmp_path: Path) -> None:
    """The one special piece of GPT-2's kind also is padding and the unknown one, whose rows nothing trains."""
    one = "<|endoftext|>"
    old = save_words(tmp_path / "old", ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "w"])
    new = save_words(tmp_path / "new", ["w", one], unk=one, pad=one, bos=one, eos=one)
    size = toy.VOCABULARY.model_copy(update={"size": 2})
    source: Any = SimpleNamespace(config=LlamaConfig(vocab_size=5))
    settings = StartFrom(folder=old, vocabulary="transplant")
    rows, _ = plan_rows(StartModel(source, old, source, (), settings, size, new, seed=1))
    assert rows.kept == {0: 4, 1: 3}


@pytest.fixture
def extended(store: TokenStore, tmp_path: Path) -> dict[str, Path]:
    """A BERT of the toy store's vocabulary and a larger tokenizer."""
    save_models(tmp_path / "old", parameters(store, "bert", "masked"), toy.VOCABULARY, store.tokenizer_folder)
    return {"old": tmp_path / "old", "new": save_words(tmp_path / "new", [*words(store), *NEW])}


def refusal(store: TokenStore, extended: dict[str, Path], change: str = "extend", **special: int) -> str:
    start_from = {"folder": str(extended["old"]), "vocabulary": change}
    with pytest.raises(UserError) as caught:
        start(parameters(store, "bert", "masked", start_from=start_from), SIZE + 3, extended["new"], **special)
    return str(caught.value)


def test_a_start_that_does_not_fit_is_refused_in_words(
    store: TokenStore, extended: dict[str, Path], tmp_path: Path
) -> None:
    pieces = words(store)
    (tmp_path / "moved").mkdir()
    moved = extended | {"new": save_words(tmp_path / "moved", [*pieces[:-1], *NEW, pieces[-1]])}
    assert (
        'expects its 64 pieces with the same ids in the stores\' tokenizer, 1 are others ("w48" is 63 there and 66'
        in (refusal(store, moved))
    )
    roles = extended | {"new": save_words(tmp_path / "roles", [*pieces, *NEW], pad="[UNK]")}
    assert "same special ids in the stores' tokenizer: pad is 3 there and 0 here" in refusal(store, roles)
    for file in extended["old"].glob("*token*"):
        file.unlink()
    assert 'has no tokenizer, and "vocabulary": "extend" compares its pieces' in refusal(store, extended)
    save_words(extended["old"], [*pieces, *NEW, "one_too_many"])
    assert "its tokenizer has ids up to 67, its model rows for 64" in refusal(store, extended, "transplant")


def test_settings_that_conflict_are_refused_in_words(store: TokenStore) -> None:
    def refused(start_from: dict[str, Any], **further: Any) -> str:
        with pytest.raises(UserError) as caught:
            parameters(store, "bert", "masked", start_from={"folder": "old", **start_from}, **further)
        return str(caught.value)

    assert "initializer" in refused({"vocabulary": "extend", "initializer": "mean_of_pices"})
    assert 'did you mean "mean_of_pieces"' in refused({"vocabulary": "extend", "initializer": "mean_of_pices"})
    assert 'needs "vocabulary"' in refused({"initializer": "mean_of_all"})
    assert "'extend' or 'transplant'" in refused({"vocabulary": "grow"}) or '"extend"' in refused(
        {"vocabulary": "grow"}
    )
    assert "would never be trained; set it to -1" in refused({"vocabulary": "extend"}, frozen_layers=0)
    assert "which lora would never train" in refused({"vocabulary": "extend"}, lora={})


def test_parameters_keep_the_initializer_by_name_and_as_an_object(store: TokenStore) -> None:
    for given in ("mean_of_all", {"type": "mean_of_all"}):
        made = parameters(
            store, "bert", "masked", start_from={"folder": "m", "vocabulary": "extend", "initializer": given}
        )
        assert made.dump()["start_from"]["initializer"] == {"type": "mean_of_all"}
        assert Parameters.from_dict(made.dump(), source="test") == made
