"""Plain Transformers classes load an export offline and give the numbers of our model."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
)

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.conversion import export as conversion
from terakoya.conversion.export import build_models, export
from terakoya.errors import TemporaryFailure, UserError
from terakoya.runs import checkpoints
from terakoya.runs.checkpoints import find_problems
from terakoya.runs.finding import find_checkpoint
from terakoya.toolkit.architectures import attention
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.checkpoint import remove_checkpoint
from terakoya.training.setup import train_in_this_process


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    root = tmp_path_factory.mktemp("export")
    store = toy.make_store(root / "train", documents=60, seed=1)
    settings = toy.parameters(store, max_steps=3, checkpoint={"save_steps": 2})
    train_in_this_process(Parameters.from_dict(settings, source="test"), root / "run")
    return root / "run"


def test_an_export_gives_our_logits(trained: Path, tmp_path: Path) -> None:
    done = export(trained, tmp_path / "model")
    assert done.step == 3 and done.models == {"": "BertForMaskedLM"}
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    assert type(model) is BertForMaskedLM
    manifest = checkpoints.read_manifest(done.checkpoint)
    parameters = Parameters.from_dict(manifest["parameters"], source="test")
    module = parameters.objective.build(
        parameters.architecture, Vocabulary.model_validate(manifest["vocabulary"])
    ).eval()
    checkpoint_state.load_module(done.checkpoint, module)
    attention.use(module, "sdpa")
    ids = torch.randint(6, 200, (2, 20))
    batch = {
        "input_ids": ids, "document_ids": torch.zeros(2, 20, dtype=torch.int64),
        "position_ids": torch.arange(20).expand(2, 20),
    }  # fmt: skip
    with torch.no_grad():
        ours = parameters.architecture.logits(module.model, parameters.architecture.hidden(module.model, batch))
        theirs = model(ids, attention_mask=torch.ones_like(ids)).logits
    assert (ours - theirs).abs().max() < 1e-5
    assert "terakoya" not in (tmp_path / "model/config.json").read_text()
    assert (tmp_path / "model/size.txt").is_file(), "the tokenizer's files are in the model's folder"


def test_the_model_folder_of_a_checkpoint_equals_its_export(trained: Path, tmp_path: Path) -> None:
    export(trained / "checkpoints/step-00000002", tmp_path / "model")
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", local_files_only=True).state_dict()
    own = AutoModelForMaskedLM.from_pretrained(trained / "checkpoints/step-00000002/model", local_files_only=True)
    assert all(torch.equal(value, exported[name]) for name, value in own.state_dict().items())


def test_the_pretraining_class_loads_a_model_with_next_sentence_prediction(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "lines", documents=40, seed=3, unit="line")
    objective = {"type": "masked_lm", "layout": "pairs", "next_sentence": True}
    settings = toy.parameters(store, store, objective=objective, max_steps=2)
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    validation = toy.records(tmp_path / "run", "validation")[2]
    assert {"mlm_loss", "nsp_loss", "masked_accuracy", "nsp_accuracy"} <= validation.keys()
    assert abs(validation["loss"] - validation["mlm_loss"] - validation["nsp_loss"]) < 1e-9
    export(tmp_path / "run", tmp_path / "model")
    model = AutoModelForPreTraining.from_pretrained(tmp_path / "model", local_files_only=True)
    folder = find_checkpoint(tmp_path / "run")
    ours = build_models(folder, checkpoints.read_manifest(folder))[""].state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    assert any("seq_relationship" in name for name in ours)


@pytest.mark.parametrize("layout", ["lines", "stream", "packed"])
def test_every_layout_trains(layout: str, tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "store", documents=40, seed=3, unit="line" if layout == "lines" else "document")
    settings = toy.parameters(
        store, objective={"type": "masked_lm", "layout": layout}, max_steps=30, logging_steps=10, micro_batch_size=16,
        checkpoint={"save_steps": 30},
    )  # fmt: skip
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    losses = [line["loss"] for _, line in sorted(toy.records(tmp_path / "run").items())]
    assert losses[-1] < losses[0] - 0.5


def test_what_cannot_be_exported_raises_an_error(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found no checkpoint"):
        export(tmp_path, tmp_path / "model")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("")
    with pytest.raises(UserError, match="already exists"):
        export(trained, tmp_path / "there")
    with pytest.raises(UserError, match="exporter tflite: not installed"):
        export(trained, tmp_path / "model", format="tflite")


def test_a_damaged_checkpoint_is_refused_and_of_a_run_the_one_before_is_taken(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = find_checkpoint(trained)
    weights = next((newest / "state").glob("model-*"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 64
    before = weights.read_bytes()
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged: state/model-00000\.safetensors"):
        export(newest, tmp_path / "model")
    assert export(trained, tmp_path / "model").step == 2
    assert "step-00000003: damaged: state/model-00000.safetensors: content changed; taking step-00000002" in caplog.text
    (newest.with_name("step-00000002") / "manifest.json").rename(tmp_path / "manifest.json")
    with pytest.raises(UserError, match=r"expected a run with a whole checkpoint.*step-00000003: damaged"):
        export(trained, tmp_path / "other")
    (tmp_path / "manifest.json").rename(newest.with_name("step-00000002") / "manifest.json")
    weights.write_bytes(before)


# ----------------------------------------------------------------------------------------------------- two models


@pytest.fixture(scope="module")
def electra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of an ELECTRA."""
    root = tmp_path_factory.mktemp("electra")
    store = toy.make_store(root / "train", documents=60, seed=1)
    settings = toy.parameters(
        store,
        architecture={
            "type": "electra", "embedding_size": 12, "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 32, "max_position_embeddings": 32,
        },
        objective={"type": "replaced_token", "sharing": "disentangled"},
        max_steps=2,
    )  # fmt: skip
    train_in_this_process(Parameters.from_dict(settings, source="test"), root / "run")
    (root / "run/parameters.json").write_text("{}")  # an export reads only the checkpoint
    return root / "run"


def test_generator_and_discriminator_are_exported_to_separate_folders(electra: Path, tmp_path: Path) -> None:
    done = export(electra, tmp_path / "model")
    assert done.models == {"generator": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining"}
    ids = torch.randint(6, 200, (2, 20))
    folder = find_checkpoint(electra)
    models = build_models(folder, checkpoints.read_manifest(folder))
    for name, auto in {"generator": AutoModelForMaskedLM, "discriminator": AutoModelForPreTraining}.items():
        model = auto.from_pretrained(tmp_path / "model" / name, local_files_only=True).eval()
        assert type(model).__name__ == done.models[name]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, models[name].eval()(ids).logits)
        assert (tmp_path / "model" / name / "size.txt").is_file(), "the tokenizer is in each"
    own = AutoModelForPreTraining.from_pretrained(folder / "model/discriminator", local_files_only=True)
    assert all(
        torch.equal(own.state_dict()[name], value) for name, value in models["discriminator"].state_dict().items()
    )


def test_a_discriminator_is_ready_for_fine_tuning(electra: Path, tmp_path: Path) -> None:
    export(electra, tmp_path / "model", only="discriminator")
    folder = tmp_path / "model"
    assert (folder / "config.json").is_file() and not (folder / "discriminator").exists()
    classifier, report = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, local_files_only=True, output_loading_info=True
    )
    assert all(name.startswith("classifier.") for name in report["missing_keys"])
    trained = AutoModelForPreTraining.from_pretrained(folder, local_files_only=True)
    assert all(
        torch.equal(value, trained.electra.state_dict()[name])
        for name, value in classifier.electra.state_dict().items()
    )
    assert classifier(torch.randint(6, 200, (2, 20))).logits.shape == (2, 3)


def test_only_names_an_existing_model(electra: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--only judge: .* has no such model; it has discriminator, generator"):
        export(electra, tmp_path / "model", only="judge")
    with pytest.raises(UserError, match=r"--only generator: .* it has one model, without a name"):
        export(trained, tmp_path / "model", only="generator")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("moment", ["find_checkpoint", "_build"])
def test_a_checkpoint_that_its_run_removes_during_an_export_is_no_wrong_model(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Once the checkpoint is found, and once its model is built and the weights are read one by one."""
    shutil.copytree(trained, tmp_path / "run")
    original = getattr(conversion, moment)

    def then_remove(*arguments: Any, **named: Any) -> Any:
        returned = original(*arguments, **named)
        remove_checkpoint(tmp_path / "run/checkpoints/step-00000003")
        return returned

    monkeypatch.setattr(conversion, moment, then_remove)
    with pytest.raises(TemporaryFailure, match=r"step-00000003: was removed by checkpoint.keep of its run while"):
        export(tmp_path / "run", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_that_is_removed_while_it_is_searched_for_is_not_damaged(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "run")

    def remove_first(folder: Path, *, hashed: Sequence[str]) -> list[str]:
        if folder.exists():
            remove_checkpoint(folder)
        return find_problems(folder, hashed=hashed)

    monkeypatch.setattr(checkpoints, "find_problems", remove_first)
    with pytest.raises(TemporaryFailure, match="while it was read; try again"):
        find_checkpoint(tmp_path / "run")
