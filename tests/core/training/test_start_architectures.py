"""Every registered architecture starts from its own export and can be frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.formats import folder_digests, model_folder
from terakoya.training.model.build import build_module
from terakoya.training.model.frozen_layers import freeze
from terakoya.training.model.start_config import compare_settings
from terakoya.training.model.start_from import load_start_weights
from terakoya_contract import toy

OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked": {"type": "masked_lm"},
    "pretraining": {"type": "masked_lm", "layout": "pairs", "next_sentence": True},
    "discriminator": {"type": "replaced_token", "generator_size": "1/2", "sharing": "none"},
    "seq2seq": {"type": "span_corruption"},
}


def pairs() -> Iterator[tuple[str, str]]:
    """Yields each bundled architecture with each head that an objective trains."""
    for name in registry().names("architectures"):
        for head in sorted(registry().component("architectures", name).heads & OBJECTIVES.keys()):
            yield name, head


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return toy.make_store(tmp_path_factory.mktemp("architectures"))


@pytest.mark.parametrize(("name", "head"), list(pairs()))
def test_an_architecture_starts_and_freezes(name: str, head: str, store: TokenStore, tmp_path: Path) -> None:
    vocabulary = store.facts.vocabulary
    architecture = toy.settings(registry().component("architectures", name)).model_dump(mode="json")
    raw = {
        "data": {"train": [str(store.folder)], "sequence_length": toy.SEQUENCE_LENGTH},
        "architecture": {"type": name, **architecture},
        "objective": OBJECTIVES[head],
        "optimizer": {"type": "adamw"},
        "schedule": {"type": "linear"},
        "batch_size": {"-1": 4},
        "max_steps": 1,
        "seed": 1,
    }
    first = Parameters.from_dict(raw, source="test")
    saved = first.objective.exports(build_module(first, vocabulary))
    for key, model in saved.items():
        model_folder.write(model, tmp_path / "model" / key)
    changed = {**raw, "seed": 2, "start_from": str(tmp_path / "model"), "frozen_layers": 1}
    second = Parameters.from_dict(changed, source="test")
    module = build_module(second, vocabulary)
    load_start_weights(second, module, vocabulary, store.tokenizer_folder)
    freeze(module, second.objective.architectures(second.architecture), vocabulary, count=second.frozen_layers)
    for key, model in second.objective.exports(module).items():
        weights = load_file(tmp_path / "model" / key / "model.safetensors")
        for weight, value in model.state_dict().items():
            assert weight not in weights or torch.equal(weights[weight], value), weight
        blocks = list(second.architecture.blocks(model))
        assert not any(parameter.requires_grad for parameter in blocks[0].parameters())
        assert all(parameter.requires_grad for parameter in blocks[-1].parameters())
        assert not model.get_input_embeddings().weight.requires_grad


def test_a_run_starts_only_from_the_weights_that_an_export_wrote(store: TokenStore, tmp_path: Path) -> None:
    raw = {
        "data": {"train": [str(store.folder)], "sequence_length": toy.SEQUENCE_LENGTH},
        "architecture": {"type": "bert", **toy.values(registry().component("architectures", "bert"))},
        "objective": OBJECTIVES["masked"], "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
        "batch_size": {"-1": 4}, "max_steps": 1, "start_from": str(tmp_path / "model"),
    }  # fmt: skip
    parameters = Parameters.from_dict(raw, source="test")
    module = build_module(parameters, store.facts.vocabulary)
    model_folder.write(parameters.objective.exports(module)[""], tmp_path / "model")
    folder_digests.write(tmp_path / "model")
    load_start_weights(parameters, module, store.facts.vocabulary, store.tokenizer_folder)
    weights = bytearray((tmp_path / "model/model.safetensors").read_bytes())
    weights[-3] ^= 1  # another finite number
    (tmp_path / "model/model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"changed since it was exported: model\.safetensors: expected SHA-256"):
        load_start_weights(parameters, module, store.facts.vocabulary, store.tokenizer_folder)


@pytest.mark.parametrize("name", registry().names("architectures"))
def test_a_run_may_choose_its_own_dropout(name: str, store: TokenStore) -> None:
    kind = registry().component("architectures", name)
    architecture = toy.settings(kind)
    own = {key: 0.25 for key, field in kind.model_fields.items() if "drop" in key and isinstance(field.default, float)}
    if not own:
        pytest.skip(f"{name} has no dropout to set")
    changed = kind.model_validate({**dict(architecture), **own})
    there, here = architecture.config(store.facts.vocabulary), changed.config(store.facts.vocabulary)
    wrong, free = compare_settings(there, here, frozenset(kind.model_fields))
    assert not wrong
    assert len(free) >= 1
