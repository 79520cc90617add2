"""Checkpoints of language-pretraining become Transformers' folders with the same logits, and training goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from language_pretraining_checkpoints import PAIR, SIZES, build, make_pair, save, save_pair
from transformers import PreTrainedModel

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.conversion.import_checkpoint import import_checkpoint
from terakoya.errors import UserError
from terakoya.training.setup import train_in_this_process

TEXTS = torch.randint(5, 200, (10, 20), generator=torch.Generator().manual_seed(0))
"""Ten texts, as ids."""


@torch.no_grad()
def difference(folder: Path, model: PreTrainedModel) -> float:
    """How far logits of the model in `folder`, loaded by plain Transformers, are from those of `model`."""
    loaded = type(model).from_pretrained(folder, local_files_only=True).eval()
    return float((loaded(input_ids=TEXTS)[0] - model(input_ids=TEXTS)[0]).abs().max())


def test_an_electra_becomes_its_two_models_and_trains_on(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "s", documents=20, seed=1)
    save_pair(tmp_path / "old" / "checkpoint-90")
    save_pair(tmp_path / "old" / "checkpoint-100")
    torch.save({}, tmp_path / "old" / "checkpoint-90" / "pytorch_model.bin")
    done = import_checkpoint(tmp_path / "old", tmp_path / "new", format="language_pretraining")
    assert done.models == {"generator": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining"}
    models = dict(zip(("generator", "discriminator"), make_pair(), strict=True))
    assert all(difference(done.out / name, model) < 1e-6 for name, model in models.items())
    architecture = {"type": "electra", "embedding_size": 12, **SIZES}
    raw = toy.parameters(
        store,
        architecture={key: value for key, value in architecture.items() if key not in ("vocab_size", "pad_token_id")},
        objective={"type": "replaced_token", "generator_size": "1/2"},
        optimizer={"type": "adamw", "learning_rate": 1e-30},
        start_from=str(done.out), max_steps=1,
    )  # fmt: skip
    train_in_this_process(Parameters.from_dict(raw, source="test"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported")
    assert all(difference(tmp_path / "exported" / name, model) < 1e-6 for name, model in models.items())
    told = refusal(lambda: train_in_this_process(
        Parameters.from_dict({**raw, "start_from": str(tmp_path / "old" / "checkpoint-100")}, source="test"),
        tmp_path / "other",
    ))  # fmt: skip
    assert told.startswith("start_from: ") and "terakoya import language_pretraining" in told


def refusal(work: Any) -> str:
    with pytest.raises(UserError) as caught:
        work()
    return str(caught.value)


def refused(folder: Path, **settings: Any) -> str:
    out = folder.parent / "out"
    text = refusal(lambda: import_checkpoint(folder, out, format="language_pretraining", settings=settings))
    assert not out.exists()
    return text


def test_export_names_the_command(tmp_path: Path) -> None:
    folder = save_pair(tmp_path / "old pair")
    assert refusal(lambda: export(folder, tmp_path / "out")) == (
        f"{folder}: holds a model of the class {PAIR}, which Transformers does not have; import it first: "
        f"terakoya import language_pretraining '{folder}' --out MODEL"
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("BertForPreTraining", {}), ("RobertaForMaskedLM", {"type_vocab_size": 2, "max_position_embeddings": 33})],
)
def test_a_model_of_transformers_stays_what_it_is(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = build(kind, **settings)
    folder = save(tmp_path / "old", model.config.to_dict(), kind, model.state_dict())
    done = import_checkpoint(folder, tmp_path / "new", format="language_pretraining")
    assert done.models == {"": kind} and difference(done.out, model) < 1e-6
    assert sorted(file.name for file in done.out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("name", "kind"), [
    ("DebertaEmdForPreTraining", "DebertaForMaskedLM"), ("DebertaV2EmdForPreTraining", "DebertaV2ForMaskedLM"),
])  # fmt: skip
def test_a_deberta_loses_its_mask_decoder_and_says_so(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    further = {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "conv_act": "gelu"}
    model = build(
        kind, relative_attention=True, position_biased_input=False, pos_att_type="p2c|c2p",
        type_vocab_size=0, **(further if "V2" in kind else {}),
    )  # fmt: skip
    weights = {**model.state_dict(), "deberta.position_embeddings.weight": torch.ones(32, 16)}
    folder = save(tmp_path / "old", model.config.to_dict(), name, weights)
    done = import_checkpoint(folder, tmp_path / "new", format="language_pretraining")
    assert done.models == {"": kind} and difference(done.out, model) < 1e-6
    assert "trained with an enhanced mask decoder, which Transformers does not have" in caplog.text
    if "V2" in kind:
        own = {key: value for key, value in SIZES.items() if key not in ("vocab_size", "pad_token_id")}
        architecture = {"type": "deberta_v2", **own, "position_buckets": 16, "share_att_key": False}
        store = toy.make_store(tmp_path / "s", documents=20, seed=1)
        raw = toy.parameters(store, architecture=architecture, start_from=str(done.out))
        told = refusal(lambda: train_in_this_process(Parameters.from_dict(raw, source="test"), tmp_path / "run"))
        assert "has weights without a place in the model: deberta.encoder.conv.LayerNorm.bias" in told


def test_embeddings_may_be_there_once_and_must_not_differ(tmp_path: Path) -> None:
    place = "discriminator__electra__embeddings__word_embeddings__weight"
    once = save_pair(tmp_path / "once", **{place: None})
    done = import_checkpoint(once, tmp_path / "new", format="language_pretraining")
    assert difference(done.out / "discriminator", make_pair()[1]) < 1e-6
    two = save_pair(tmp_path / "two", **{place: torch.zeros(200, 12)})
    assert "these differ: electra.embeddings.word_embeddings.weight" in refused(two)


def test_the_heads_of_a_generator_may_be_given(tmp_path: Path) -> None:
    folder = save_pair(tmp_path / "old")
    done = import_checkpoint(
        folder, tmp_path / "new", format="language_pretraining", settings={"generator_heads": 4}
    )  # fmt: skip
    assert json.loads((done.out / "generator" / "config.json").read_text())["num_attention_heads"] == 4
    assert "(--generator-heads N)" in refused(folder, generator_heads=3)


class Command:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_code_in_a_pickle_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_pair(tmp_path / "old")
    torch.save({"generator.x": Command()}, folder / "pytorch_model.bin")
    assert "not known to be harmless; nothing was read" in refused(folder)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "expected a config.json or folders checkpoint-N, found neither"),
        ({"dataset_info.json": {}}, "is a data set of create_datasets.py"),
        ({"config.json": {"architectures": ["DebertaV3ForPreTraining"]}}, "expected one of ElectraForPretrainingModel"),
        ({"config.json": {"architectures": [PAIR]}}, "expected pytorch_model.bin or model.safetensors, found neither"),
    ],
)
def test_other_folders_are_refused(files: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert expected in refused(folder)
