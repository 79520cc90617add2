"""Entries of retarfi/language-pretraining's parameter.json that start from trained models work as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.setup import train_in_this_process
from terakoya_language_pretraining.entries import ChosenEntry, read_entry

RUN: dict[str, Any] = {
    "warmup-steps": 1, "learning-rate": 5e-4, "batch-size": {"-1": 8}, "train-steps": 2, "save-steps": 100000,
}  # fmt: skip
BERT = {"pretrained_model_name_or_path": "someone/bert-small-japanese", "flozen-layers": 1, **RUN}
ELECTRA = {
    "pretrained_generator_model_name_or_path": "someone/electra-generator",
    "pretrained_discriminator_model_name_or_path": "someone/electra-discriminator",
    "flozen-layers": -1,
    **RUN,
}
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 48, "vocab_size": 200, "pad_token_id": 0}


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with models under the names of a hub."""
    monkeypatch.chdir(tmp_path)
    bert = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "hidden_dropout_prob": 0.2}
    save(BertForMaskedLM(BertConfig(**SIZES, **bert, layer_norm_eps=1e-6)), "bert-small-japanese")
    wide = {"embedding_size": 12, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    small = {**wide, "hidden_size": 8, "intermediate_size": 20, "num_attention_heads": 2}
    generator = ElectraForMaskedLM(ElectraConfig(**SIZES, **small))
    discriminator = ElectraForPreTraining(ElectraConfig(**SIZES, **wide))
    discriminator.electra.embeddings.load_state_dict(generator.electra.embeddings.state_dict())
    save(generator, "electra-generator")
    save(discriminator, "electra-discriminator")
    return tmp_path


def save(model: PreTrainedModel, name: str) -> None:
    model.save_pretrained(Path("someone") / name)


def read(model_type: str, entry: dict[str, Any], store: Path = Path("store")) -> dict[str, Any]:
    file = Path("parameter.json")
    file.write_text(json.dumps({model_type: entry}))
    return {**read_entry(file, ChosenEntry(model_type, [store])), "trackers": []}


def refusal(model_type: str, entry: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        Parameters.from_dict(read(model_type, entry), source="parameter.json")
    return str(caught.value)


def test_sizes_and_length_are_the_folders(work_folder: Path) -> None:
    raw = read("bert-small-additional", BERT)
    parameters: Any = Parameters.from_dict(raw, source="parameter.json")
    architecture = parameters.architecture
    assert (architecture.hidden_size, architecture.intermediate_size, architecture.num_hidden_layers) == (16, 32, 2)
    assert (architecture.layer_norm_eps, architecture.hidden_dropout_prob) == (1e-6, 0.2)
    assert parameters.data.sequence_length == architecture.max_position_embeddings == 48
    assert parameters.frozen_layers == 1
    assert str(parameters.start_from.folder) == "someone/bert-small-japanese", "as written in the entry"
    assert (
        parameters.objective.next_sentence and parameters.max_steps == 2 and parameters.checkpoint.save_steps == 100000
    )
    shorter: Any = Parameters.from_dict(read("bert-x", {**BERT, "sequence-length": 32}), source="parameter.json")
    assert (shorter.data.sequence_length, shorter.architecture.max_position_embeddings) == (32, 48)


def test_electras_generator_is_its_own_folders(work_folder: Path) -> None:
    parameters: Any = Parameters.from_dict(read("electra-small-additional", ELECTRA), source="parameter.json")
    assert (parameters.architecture.hidden_size, parameters.architecture.embedding_size) == (16, 12)
    generator = parameters.objective.generator
    assert (generator.hidden_size, generator.intermediate_size, generator.num_attention_heads) == (8, 20, 2)
    assert parameters.objective.generator_size is None and parameters.objective.mlm_probability == 0.15
    assert parameters.frozen_layers == -1
    folders = {name: str(folder) for name, folder in parameters.start_from.folder.items()}
    assert folders == {"generator": "someone/electra-generator", "discriminator": "someone/electra-discriminator"}
    stated: Any = Parameters.from_dict(read("electra-x", {**ELECTRA, "mask-percent": 25}), source="parameter.json")
    assert stated.objective.mlm_probability == 0.25


def test_positions_are_counted_as_the_architecture_counts_them(work_folder: Path) -> None:
    """RoBERTa's config has padding id + 1 more positions than the longest row."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "type_vocab_size": 1}
    save(RobertaForMaskedLM(RobertaConfig(**{**SIZES, "max_position_embeddings": 49, **shape})), "roberta")
    store = toy.make_store(work_folder / "s", documents=20, seed=1)
    raw = read("roberta-x", {**BERT, "pretrained_model_name_or_path": "someone/roberta"}, store)
    assert raw["data"]["sequence_length"] == raw["architecture"]["max_position_embeddings"] == 48
    train_in_this_process(Parameters.from_dict(raw, source="parameter.json"), work_folder / "run")


def test_a_name_on_the_hub_is_refused_with_the_download_command(work_folder: Path) -> None:
    expected = refusal("bert-x", {**BERT, "pretrained_model_name_or_path": "izumi-lab/bert-small-japanese"})
    assert expected.startswith(
        "parameter.json: bert-x.pretrained_model_name_or_path: izumi-lab/bert-small-japanese is no"
    )
    assert "hf download izumi-lab/bert-small-japanese --local-dir izumi-lab/bert-small-japanese" in expected
    assert "terakoya train RUN/parameters.json --out RUN" in expected


@pytest.mark.parametrize(
    ("model_type", "entry", "expected"),
    [
        ("bert-x", {**RUN, "flozen-layers": 3}, "bert-x.flozen-layers: there is nothing to freeze without pretrained_"),
        ("bert-x", {**BERT, "flozen-layers": -2}, "bert-x.flozen-layers: expected greater than or equal to -1, got -2"),
        ("bert-x", {**BERT, "pretrained_model_name_or_path": 3}, "name_or_path: expected a folder, got 3"),
        ("bert-x", {**BERT, "warmup-steps": "a"}, 'bert-x.warmup-steps: expected an integer, got "a"'),
        ("bert-x", {**BERT, "hidden-size": 0}, "bert-x.hidden-size: expected greater than 0, got 0"),
        (
            "bert-x",
            {**RUN, "pretrained_generator_model_name_or_path": "x"},
            "bert-x: pretrained_generator_model_name_or_path: has no effect in an entry of bert; expected pretrained_",
        ),
        (
            "electra-x",
            {**RUN, "pretrained_model_name_or_path": "x"},
            "electra-x: pretrained_model_name_or_path: has no effect in an entry of electra; expected pretrained_",
        ),
        (
            "electra-x",
            {key: value for key, value in ELECTRA.items() if "generator" not in key},
            "electra-x.pretrained_generator_model_name_or_path: missing; pretrained_discriminator_model_name_or_path",
        ),
        ("nobert-x", BERT, "nobert: not installed"),
    ],
)
def test_an_invalid_entry_is_refused(model_type: str, entry: dict[str, Any], expected: str, work_folder: Path) -> None:
    assert expected in refusal(model_type, entry)


def test_sizes_that_the_entry_states_are_compared_with_the_folders(work_folder: Path) -> None:
    store = toy.make_store(work_folder / "s", documents=20, seed=1, unit="line")
    raw = read("bert-x", {**BERT, "number-of-layers": 3}, store)
    with pytest.raises(UserError, match="num_hidden_layers is 2 there and 3 in the parameters"):
        train_in_this_process(Parameters.from_dict(raw, source="parameter.json"), work_folder / "run")
