"""Every entry of retarfi/language-pretraining's parameter.json, from training to plain Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers
from loaded_exports import loads
from selection import at_night
from transformers import PreTrainedModel

from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process
from terakoya_language_pretraining.entries import SHIPPED, ChosenEntry, read_entry


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_store(tmp_path_factory.mktemp("family") / "store", documents=20, seed=1, unit="line")


@pytest.mark.parametrize(
    "name",
    at_night(
        json.loads(SHIPPED.read_text()),
        always=("electra-small-additional",),
    ),
)
def test_an_entry_trains_resumes_is_exported_and_loads(
    name: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry with every width divided by 16 and two layers, or with a start from such a model of its own depth."""
    monkeypatch.chdir(tmp_path)
    entry = json.loads(SHIPPED.read_text())[name]
    published = save_published(entry)
    for key in ("hidden-size", "ffn-inner-hidden-size", "embedding-size"):
        if key in entry:
            entry[key] //= 16
    if not published:
        entry |= {"number-of-layers": 2, "sequence-length": 32}
    entry |= {
        "warmup-steps": 1, "learning-rate": 1e-3,
        "batch-size": dict.fromkeys(entry["batch-size"], 6) if len(entry["batch-size"]) == 1 else {"-1": 6},
    }  # fmt: skip
    file = tmp_path / "parameter.json"
    for steps in (2, 4):
        file.write_text(json.dumps({name: {**entry, "train-steps": steps}}))
        raw = {**read_entry(file, ChosenEntry(name, [store])), "trackers": [], "logging_steps": 1}
        train_in_this_process(Parameters.from_dict(raw, source=file.name), tmp_path / "run")
    course = toy.losses(tmp_path / "run")
    assert sorted(course) == [1, 2, 3, 4] and set(toy.records(tmp_path / "run", "resume")) == {2}
    loaded = loads(tmp_path / "run", tmp_path / "model")
    assert published.keys() == (loaded.keys() if name.endswith("-additional") else set())
    for role, before in published.items():
        after, frozen = dict(loaded[role].named_parameters()), is_frozen(entry["flozen-layers"])
        assert all(torch.equal(after[key], value) for key, value in before.named_parameters() if frozen(key))
        moved = [key for key, value in before.named_parameters() if not torch.equal(after[key], value)]
        assert moved and not any(map(frozen, moved))
        lowest = max(entry["flozen-layers"], 0)
        assert any(f".layer.{lowest}." in key for key in moved), "the layers above are trained"
        assert any("embeddings" in key for key in moved) == (entry["flozen-layers"] < 0)


def is_frozen(layers: int) -> Callable[[str], bool]:
    """Returns whether the weight of a name is frozen: embeddings and the lowest `layers`; -1: none."""
    lowest = tuple(f".encoder.layer.{number}." for number in range(layers))
    return lambda name: layers >= 0 and (".embeddings" in name or any(each in name for each in lowest))


def save_published(entry: dict[str, Any]) -> dict[str, PreTrainedModel]:
    """Saves small models, by role, under the names from which `entry` continues."""
    shape = {
        "num_hidden_layers": 12, "hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 4,
        "max_position_embeddings": 32, "vocab_size": 200, "pad_token_id": 0,
    }  # fmt: skip
    small = {**shape, "hidden_size": 4, "intermediate_size": 16, "num_attention_heads": 1, "embedding_size": 8}
    torch.manual_seed(0)
    models: dict[str, PreTrainedModel] = {}
    if "pretrained_model_name_or_path" in entry:
        models[""] = transformers.BertForPreTraining(transformers.BertConfig(**shape))
        models[""].save_pretrained(entry["pretrained_model_name_or_path"])
    if "pretrained_generator_model_name_or_path" in entry:
        config = transformers.ElectraConfig(**{**shape, "embedding_size": 8})
        generator = transformers.ElectraForMaskedLM(transformers.ElectraConfig(**small))
        discriminator = transformers.ElectraForPreTraining(config)
        discriminator.electra.embeddings.load_state_dict(generator.electra.embeddings.state_dict())
        for role, model in (("generator", generator), ("discriminator", discriminator)):
            model.save_pretrained(entry[f"pretrained_{role}_model_name_or_path"])
            models[role] = model
    return models
