"""A larger model begins with the weights of a smaller one, and where that is possible with its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from terakoya.config.parameters import Parameters
from terakoya.config.start_from import StartFrom
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.formats import model_folder
from terakoya.training.model.build import build_module
from terakoya.training.model.start_from import LoadedWeights, load_start_weights
from terakoya_contract import toy

OBJECTIVES = {"masked": "masked_lm", "causal": "causal_lm", "seq2seq": "span_corruption"}
LOADERS = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner")
DEPTHS = ("num_hidden_layers", "num_layers")


class Growing:
    """A small model in a folder, and runs that start from it."""

    def __init__(self, name: str, store: TokenStore, folder: Path, **further: Any) -> None:
        self.store, self.folder = store, folder
        component = registry().component("architectures", name)
        self.head = next(head for head in OBJECTIVES if head in component.heads)
        self.settings = {"type": name, **toy.settings(component, **further).model_dump(mode="json")}
        module = build_module(self.parameters({}), store.facts.vocabulary)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for value in module.parameters():
                value.add_(0.2 * torch.randn(value.shape, generator=generator))
        model = self.model(module)
        model_folder.write(model, folder)
        self.small = LOADERS[self.head].from_pretrained(folder).eval()

    def parameters(self, changes: dict[str, Any], grow: Any = None, **further: Any) -> Parameters:
        raw = {
            "data": {"train": [str(self.store.folder)], "sequence_length": toy.SEQUENCE_LENGTH},
            "architecture": {**self.settings, **changes},
            "objective": {"type": OBJECTIVES[self.head]},
            "optimizer": {"type": "adamw"},
            "schedule": {"type": "linear"},
            "batch_size": {"-1": 4},
            "max_steps": 1,
            "start_from": {"folder": str(self.folder), "grow": grow} if grow else None,
            **further,
        }
        return Parameters.from_dict(raw, source="test")

    def times(self, factor: int, names: tuple[str, ...]) -> dict[str, int]:
        return {name: factor * self.settings[name] for name in names if self.settings.get(name)}

    def start(self, changes: dict[str, Any], grow: Any) -> tuple[Any, LoadedWeights]:
        parameters = self.parameters(changes, grow)
        module = build_module(parameters, self.store.facts.vocabulary)
        state = torch.get_rng_state()
        loaded = load_start_weights(parameters, module, self.store.facts.vocabulary, self.store.tokenizer_folder)
        assert torch.equal(state, torch.get_rng_state())
        return self.model(module), loaded

    def model(self, module: nn.Module) -> Any:
        return next(iter(self.parameters({}).objective.exports(module).values()))

    def plain(self, model: Any, folder: Path) -> Any:
        """`model` as plain Transformers loads it."""
        model_folder.write(model, folder)
        return LOADERS[self.head].from_pretrained(folder).eval()

    def logits(self, model: Any) -> Tensor:
        ids = torch.arange(5, 29)[None]
        further = {"decoder_input_ids": ids.flip(1)} if self.head == "seq2seq" else {}
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, **further).logits
        return logits


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return toy.make_store(tmp_path_factory.mktemp("growth"))


def relative(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max() / first.abs().max())


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama", "modernbert", "t5"])
def test_blocks_that_begin_without_effect_keep_the_logits(name: str, store: TokenStore, tmp_path: Path) -> None:
    growing = Growing(name, store, tmp_path / "small")
    model, loaded = growing.start(growing.times(3, DEPTHS), "identity")
    assert relative(growing.logits(growing.small), growing.logits(growing.plain(model, tmp_path / "large"))) < 1e-5
    assert "as before" in loaded.notes[-1]
    blocks = list(growing.parameters(growing.times(3, DEPTHS)).architecture.blocks(model))
    small, large = blocks[0].state_dict(), blocks[4].state_dict()
    assert all(not large[weight].any() or torch.equal(large[weight], small[weight]) for weight in large.keys() & small)
    assert any(value.any() for value in large.values())


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta_v2", "gpt2", "gptj", "qwen3", "modernbert_decoder"])
def test_wider_models_keep_the_logits(name: str, store: TokenStore, tmp_path: Path) -> None:
    growing = Growing(name, store, tmp_path / "small")
    model, loaded = growing.start(growing.times(2, WIDTHS), "tile")
    assert relative(growing.logits(growing.small), growing.logits(growing.plain(model, tmp_path / "large"))) < 1e-5
    assert "hidden size" in loaded.notes[-1]


def test_a_head_of_narrow_embeddings_that_stay_keeps_the_logits(store: TokenStore, tmp_path: Path) -> None:
    """ELECTRA's head is tied to embeddings that are as wide in the larger model."""
    growing = Growing("electra", store, tmp_path / "small", embedding_size=12)
    model, loaded = growing.start(growing.times(2, WIDTHS), "tile")
    assert relative(growing.logits(growing.small), growing.logits(growing.plain(model, tmp_path / "large"))) < 1e-5
    assert "as before" in loaded.notes[-1]


def test_copies_learn_different_things(store: TokenStore, tmp_path: Path) -> None:
    growing = Growing("gpt2", store, tmp_path / "small")
    model, _ = growing.start(growing.times(2, WIDTHS), "tile")
    plain = growing.plain(model, tmp_path / "large")
    ids = torch.arange(5, 29)[None]
    plain(input_ids=ids, labels=ids).loss.backward()
    gradient = plain.transformer.h[0].mlp.c_fc.weight.grad
    half = len(gradient) // 2
    assert relative(gradient[:half], gradient[half:]) < 1e-5  # copies of an input receive the same value
    gradient = plain.transformer.h[0].mlp.c_proj.weight.grad
    half = gradient.shape[1] // 2
    assert relative(gradient[:, :half], gradient[:, half:]) > 1e-3


def test_stacked_blocks_are_copies(store: TokenStore, tmp_path: Path) -> None:
    growing = Growing("bert", store, tmp_path / "small")
    model, loaded = growing.start({"num_hidden_layers": 5}, "stack")
    assert "2 to 5 blocks" in loaded.notes[-1]
    assert "logits change" in loaded.notes[-1]
    for index, block in enumerate(model.bert.encoder.layer):
        small = growing.small.bert.encoder.layer[index % 2].state_dict()
        assert all(torch.equal(value, small[name]) for name, value in block.state_dict().items())
    weights = growing.small.state_dict()
    others = {name: value for name, value in model.state_dict().items() if ".layer." not in name}
    assert others
    assert all(torch.equal(value, weights[name]) for name, value in others.items())


def test_a_block_without_a_counterpart_takes_the_nearest(store: TokenStore, tmp_path: Path) -> None:
    """ModernBERT's first block has no norm before its attention."""
    growing = Growing("modernbert", store, tmp_path / "small")
    model, _ = growing.start({"num_hidden_layers": 4}, "stack")
    wanted = growing.small.model.layers[1].attn_norm.weight
    assert torch.equal(model.model.layers[2].attn_norm.weight, wanted)


def test_both_at_once(store: TokenStore, tmp_path: Path) -> None:
    growing = Growing("llama", store, tmp_path / "small")
    model, loaded = growing.start(growing.times(2, WIDTHS + DEPTHS), ["tile", "identity"])
    assert relative(growing.logits(growing.small), growing.logits(growing.plain(model, tmp_path / "large"))) < 1e-5
    assert "2 to 4 blocks, hidden size" in loaded.notes[-1]


@pytest.mark.parametrize(
    ("name", "changes", "grow", "message"),
    [
        ("bert", {"num_hidden_layers": 4}, "identity", "names no output_layers"),
        ("gpt2", {"num_hidden_layers": 1}, "stack", "it has 2 blocks, the architecture 1"),
        ("gpt2", {}, "stack", "as large as the architecture"),
        ("gpt2", {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 8}, "tile", "2 there and 4"),
        ("gpt2", {"hidden_size": 64}, "tile", "attention heads have"),
        ("gpt2", {"hidden_size": 64}, "stack", r"hidden_size is 16 there and 64 .*start_from\.grow"),
        ("gpt2", {"hidden_size": 8, "num_attention_heads": 2}, "tile", "cannot become"),
    ],
)
def test_what_cannot_grow(
    name: str, changes: dict[str, Any], grow: str, message: str, store: TokenStore, tmp_path: Path
) -> None:
    growing = Growing(name, store, tmp_path / "small")
    with pytest.raises(UserError, match="start_from: .*" + message):
        growing.start(changes, grow)


def test_settings() -> None:
    assert StartFrom.model_validate("folder").ways_to_grow == ()
    assert StartFrom.model_validate({"folder": "x", "grow": "tile"}).ways_to_grow == ("tile",)
    with pytest.raises(ValidationError, match="name one of them"):
        StartFrom.model_validate({"folder": "x", "grow": ["stack", "identity"]})


def test_adapters_refuse_it(store: TokenStore, tmp_path: Path) -> None:
    growing = Growing("gpt2", store, tmp_path / "small")
    with pytest.raises(UserError, match=r"start_from\.grow"):
        growing.parameters({"num_hidden_layers": 4}, "stack", lora={"r": 2})
