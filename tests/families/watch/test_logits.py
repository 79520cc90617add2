"""Logits of validation rows in a file: what plain Transformers computes from the run's model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, ElectraForPreTraining

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.setup import train_in_this_process

GPT = {
    "architecture": {
        "type": "gpt2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "n_inner": 32,
        "max_position_embeddings": 32,
    },
    "objective": {"type": "causal_lm", "append_eos": False},
    "precision": "bf16",
}  # fmt: skip
ELECTRA = {
    "architecture": {
        "type": "electra", "embedding_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32,
    },
    "objective": {"type": "replaced_token", "mlm_probability": 0.2, "generator_size": "1/2"},
}  # fmt: skip


def written(store: Path, validation_store: Path, out: Path, **changes: Any) -> dict[str, np.ndarray]:
    settings = toy.parameters(store, validation_store, max_steps=2, evaluation={"steps": 2, "batches": 2}, **changes)
    train_in_this_process(Parameters.from_dict(settings, source="logits"), out)
    assert toy.records(out, "logits")[2]["file"] == "logits/step-2.safetensors"
    return load_file(out / "logits/step-2.safetensors")


def compared(model: torch.nn.Module, found: dict[str, np.ndarray], row: str, name: str = "logits") -> int:
    """Compares the logits of `row`, document by document, with those of `model`; returns the number of documents."""
    documents = found[f"{row}/document_ids"]
    for document in np.unique(documents):
        ids = torch.from_numpy(found[f"{row}/input_ids"][documents == document])
        with torch.no_grad():
            expected = model.eval()(ids[None]).logits[0].numpy()
        np.testing.assert_allclose(found[f"{row}/{name}"][documents == document], expected, atol=1e-5, rtol=0)
    return len(np.unique(documents))


def test_logits_of_packed_and_masked_rows_are_those_of_the_saved_model(
    store: Path, validation_store: Path, tmp_path: Path
) -> None:
    found = written(store, validation_store, tmp_path / "run", events={"logits": {"rows": [0, 43, 50], "steps": [2]}})
    assert not (tmp_path / "run/logits/step-0.safetensors").exists()
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run/checkpoints/step-00000002/model")
    names = {name.rpartition("/")[0] for name in found}
    assert {name.rpartition("/")[2] for name in names} == {"0", "43", "50"}
    assert max(compared(model, found, row) for row in names) > 1, "documents in one row are apart"
    assert any((found[f"{row}/input_ids"] == 4).any() for row in names), "rows are masked as in a validation"


def test_the_largest_logits_of_a_causal_model_in_bf16(store: Path, validation_store: Path, tmp_path: Path) -> None:
    whole = written(store, validation_store, tmp_path / "whole", events={"logits": {}}, **GPT)
    top = written(store, validation_store, tmp_path / "top", events={"logits": {"top": 5}}, **GPT)
    plain = train_in_this_process(
        Parameters.from_dict(
            toy.parameters(store, validation_store, max_steps=2, evaluation={"steps": 2, "batches": 2}, **GPT),
            source="plain",
        ),
        tmp_path / "plain",
    )
    assert plain.step == 2 and toy.losses(tmp_path / "plain") == toy.losses(tmp_path / "top")
    (row,) = {name.rpartition("/")[0] for name in whole}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/checkpoints/step-00000002/model")
    compared(model, whole, row)
    order = np.argsort(-whole[f"{row}/logits"], axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(top[f"{row}/top_ids"], order)
    np.testing.assert_array_equal(top[f"{row}/logits"], np.take_along_axis(whole[f"{row}/logits"], order, 1))
    labels, ids = whole[f"{row}/labels"], whole[f"{row}/input_ids"]
    same = (whole[f"{row}/document_ids"][1:] == whole[f"{row}/document_ids"][:-1]) & (labels[:-1] >= 0)
    assert same.any() and (labels[:-1][same] == ids[1:][same]).all()


@pytest.mark.nightly
def test_a_generator_and_a_discriminator(store: Path, validation_store: Path, tmp_path: Path) -> None:
    found = written(store, validation_store, tmp_path / "run", events={"logits": {}}, **ELECTRA)
    (row,) = {name.partition("/0/")[0] + "/0" for name in found}
    folder = tmp_path / "run/checkpoints/step-00000002/model"
    compared(AutoModelForMaskedLM.from_pretrained(folder / "generator"), found, row, "generator/logits")
    discriminator = ElectraForPreTraining.from_pretrained(folder / "discriminator")
    compared(discriminator, found, row, "discriminator/logits")


def test_rows_that_are_not_there_are_refused(store: Path, validation_store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"events\.logits\.rows: there are no rows to read"):
        Parameters.from_dict(toy.parameters(store, events={"logits": {}}), source="none")
    with pytest.raises(UserError, match=r"events\.logits\.rows: expected rows below \d+, those of .*, got 999,999"):
        written(store, validation_store, tmp_path / "run", events={"logits": {"rows": [999_999]}})
