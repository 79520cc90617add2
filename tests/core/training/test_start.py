"""A run that starts from a Transformers folder has its weights, or one error lists everything that prevents it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy
from safetensors.torch import load_file, save_file
from selection import at_night
from small_store import rewrite_store_json
from start_folders import NEXT_SENTENCE, begin, electra, refusal, save_bert, save_electra, settings, trainer
from torch import Tensor
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    PreTrainedTokenizerFast,
)

from terakoya.components import Objective
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.plugins import registry
from terakoya.rows.stores import Stores
from terakoya.runs import checkpoints
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module
from terakoya.training.setup import train_in_this_process
from terakoya.training.trainer import Trainer

HEAD_OF_MASKED = (
    "cls.predictions.bias, cls.predictions.decoder.bias, cls.predictions.transform.LayerNorm.bias, "
    "cls.predictions.transform.LayerNorm.weight, cls.predictions.transform.dense.bias, "
    "cls.predictions.transform.dense.weight"
)
HEAD_OF_SENTENCES = (
    "bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias, cls.seq_relationship.weight"
)


Score = Callable[[Tensor, Tensor], Tensor]


def by_document(batch: Mapping[str, Tensor], ids: Tensor, labels: Tensor, score: Score) -> float:
    """The sum of `score(ids, labels)` (1, n) over all documents, each by itself, as plain Transformers reads it."""
    total = 0.0
    for row, documents in enumerate(batch["document_ids"]):
        for document in documents.unique():
            if document >= 0:
                here = documents == document
                total += float(score(ids[row, here][None], labels[row, here][None]))
    return total


def first_batches(made: Trainer) -> list[dict[str, Tensor]]:
    return [{name: torch.from_numpy(array) for name, array in each.arrays.items()} for each in made.batches(0).real]


# -------------------------------------------------------------------------------------------------- real numbers


def test_the_first_loss_is_that_of_plain_transformers(store: Path, tmp_path: Path) -> None:
    plain = save_bert(tmp_path / "bert")
    made = trainer(settings(store, str(tmp_path / "bert")), tmp_path / "run")
    total, count = 0.0, 0

    def score(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(plain(input_ids=ids).logits[0], labels[0], reduction="sum")

    for batch in first_batches(made):
        labels = torch.full_like(batch["input_ids"], -100).flatten()
        used = batch["masked_labels"] != -100
        labels[batch["masked_positions"][used]] = batch["masked_labels"][used]
        with torch.no_grad():
            total += by_document(batch, batch["input_ids"], labels.view_as(batch["input_ids"]), score)
        count += int(used.sum())
    values = made.one_step().values
    assert values is not None and values["loss"] == pytest.approx(total / count, rel=1e-5)
    drawn = trainer(settings(store, None), tmp_path / "drawn").one_step().values
    assert drawn is not None and abs(drawn["loss"] - values["loss"]) > 0.1


def test_both_first_losses_of_electra_are_those_of_plain_transformers(store: Path, tmp_path: Path) -> None:
    generator, discriminator = save_electra(tmp_path / "electra")
    made = trainer(electra(store, str(tmp_path / "electra")), tmp_path / "run")
    module: Any = made.engine.module
    module.sample = lambda odds, batch: (batch["masked_labels"].clamp(min=0) * 7 + 3) % 200
    sums, masked, tokens = [0.0, 0.0], 0, 0

    def scored(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(generator(input_ids=ids).logits[0], labels[0], reduction="sum")

    def judged(ids: Tensor, labels: Tensor) -> Tensor:
        logits = discriminator(input_ids=ids).logits
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum")

    for batch in first_batches(made):
        ids, used = batch["input_ids"], batch["masked_labels"] != -100
        places, originals = batch["masked_positions"][used], batch["masked_labels"][used]
        labels, corrupted = torch.full_like(ids, -100).flatten(), ids.flatten().clone()
        labels[places], corrupted[places] = originals, (originals * 7 + 3) % 200
        replaced = torch.zeros_like(labels)
        replaced[places] = (corrupted[places] != originals).long()
        with torch.no_grad():
            sums[0] += by_document(batch, ids, labels.view_as(ids), scored)
            sums[1] += by_document(batch, corrupted.view_as(ids), replaced.view_as(ids), judged)
        masked, tokens = masked + int(used.sum()), tokens + int((batch["document_ids"] >= 0).sum())
    values = made.one_step().values
    assert values is not None
    assert values["generator_loss"] == pytest.approx(sums[0] / masked, rel=1e-5)
    assert values["discriminator_loss"] == pytest.approx(sums[1] / tokens, rel=1e-5)


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin", "old_bin", "half"])
def test_every_form_of_weights_is_read(form: str, store: Path, tmp_path: Path) -> None:
    plain, folder = save_bert(tmp_path / "model"), tmp_path / form
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    if form in ("bin", "old_bin"):
        plain.config.save_pretrained(folder)
        old = expected
        if form == "old_bin":  # the format of old checkpoints
            old = {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
                   for name, value in expected.items()}  # fmt: skip
            old["bert.embeddings.position_ids"] = torch.arange(32)[None]
        torch.save(old, folder / "pytorch_model.bin")
    elif form == "half":
        plain.half().save_pretrained(folder)
        expected = {name: value.half().float() for name, value in expected.items()}
    else:
        plain.save_pretrained(folder, max_shard_size="5KB" if form == "sharded" else "1GB")
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (form == "sharded")
    got = begin(settings(store, str(folder))).model.state_dict()
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == torch.float32 and torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_an_export_of_two_models_is_one_folder_or_two(store: Path, tmp_path: Path) -> None:
    raw = electra(store, None)
    train_in_this_process(Parameters.from_dict(raw, source="test"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model")
    one = begin(electra(store, str(tmp_path / "model")))
    for name in ("generator", "discriminator"):
        for key, value in load_file(tmp_path / "model" / name / "model.safetensors").items():
            assert torch.equal(getattr(one, name).state_dict()[key], value), key
    shutil.move(tmp_path / "model/generator", tmp_path / "elsewhere")
    pair = {"generator": str(tmp_path / "elsewhere"), "discriminator": str(tmp_path / "model/discriminator")}
    two = begin(electra(store, pair))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    said = refusal(electra(store, str(tmp_path / "model")))
    assert "found no config.json in it; it holds discriminator/; name one of these" in said
    said = refusal(electra(store, str(tmp_path / "elsewhere")))
    assert 'is one model, the objective trains "discriminator", "generator"; give a folder for each' in said


def test_embeddings_that_differ_start_as_their_difference(store: Path, tmp_path: Path) -> None:
    generator, discriminator = save_electra(tmp_path / "e", alike=False)
    module = begin(electra(store, str(tmp_path / "e"), sharing="disentangled"))
    words, sums = (model.get_input_embeddings().weight for model in (generator, discriminator))
    embedding = module.discriminator.get_input_embeddings()
    assert embedding.shared is module.generator.get_input_embeddings() and torch.equal(embedding.shared.weight, words)
    assert torch.equal(embedding.difference.weight, sums - words) and embedding.difference.weight.requires_grad
    got = module.discriminator.state_dict()
    for name, value in discriminator.state_dict().items():
        assert "word_embeddings" in name or torch.equal(got[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sharing"),
    at_night(
        [("electra", "tied"), ("electra", "none"), ("electra", "disentangled"), ("deberta_v2", "disentangled")],
        always=[("electra", "tied"), ("deberta_v2", "disentangled")],
    ),
)
def test_a_run_that_starts_from_an_export_has_its_logits(
    family: str, sharing: str, store: Path, tmp_path: Path
) -> None:
    raw = electra(store, None, sharing=sharing)
    if family == "deberta_v2":
        sizes = {key: value for key, value in raw["architecture"].items() if key not in ("type", "embedding_size")}
        raw["architecture"] = {"type": family, **sizes, "position_buckets": 8}
        raw["objective"] = {
            "type": "replaced_token", "sharing": sharing, "generator": {**raw["architecture"], "num_hidden_layers": 1},
        }  # fmt: skip
    raw["optimizer"] = {"type": "adamw", "learning_rate": 0.02}
    train_in_this_process(Parameters.from_dict({**raw, "max_steps": 4}, source="test"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model")
    parameters = Parameters.from_dict({**raw, "start_from": str(tmp_path / "model")}, source="test")
    models = parameters.objective.exports(begin({**raw, "start_from": str(tmp_path / "model")}))
    ids = torch.tensor([[2, 30, 31, 4, 33, 34, 35, 3]])
    for name, model in models.items():
        plain = type(model).from_pretrained(tmp_path / "model" / name, local_files_only=True).eval()
        attention.release(model)
        with torch.no_grad():
            expected, got = (each(input_ids=ids).logits for each in (plain, model.eval()))
        assert (expected - got).abs().max() <= 1e-6
    one, other = (model.get_input_embeddings().weight for model in models.values())
    assert torch.equal(one, other) == (sharing == "tied")


# -------------------------------------------------------------------------------------------------------- heads


def test_a_missing_head_is_an_error_unless_new_heads_are_allowed(store: Path, tmp_path: Path) -> None:
    body = save_bert(tmp_path / "body", BertModel)
    raw = settings(store, str(tmp_path / "body"))
    said = refusal(raw).splitlines()
    assert said[0] == (
        f"start_from: {tmp_path}/body: has no {HEAD_OF_MASKED}; "
        'allow it with "start_from": {"folder": ..., "new_heads": true}'
    )
    assert said[1].startswith(
        f"start_from: {tmp_path}/body: has weights without a place in the model: pooler.dense.bias"
    )
    assert said[1].endswith('"drop_heads": true}') and len(said) == 2
    allowed = {"folder": str(tmp_path / "body"), "new_heads": True, "drop_heads": True}
    module = begin({**raw, "start_from": allowed})
    assert f"has no {HEAD_OF_MASKED}; they are randomly initialised" in begin.notes[0]  # type: ignore[attr-defined]
    assert "they are not used" in begin.notes[1]  # type: ignore[attr-defined]
    for name, value in body.state_dict().items():
        assert name.startswith("pooler") or torch.equal(module.model.bert.state_dict()[name], value)
    parameters = Parameters.from_dict({**raw, "start_from": None}, source="test")
    drawn: Any = build_module(parameters, Stores.open(parameters.data).vocabulary)
    for name, value in drawn.model.cls.predictions.transform.state_dict().items():
        assert torch.equal(module.model.cls.predictions.transform.state_dict()[name], value), (
            "initialised from the seed"
        )


def test_next_sentence_needs_its_head(line_store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "masked")
    save_bert(tmp_path / "both", BertForPreTraining)
    assert f"has no {HEAD_OF_SENTENCES}" in refusal(
        settings(line_store, str(tmp_path / "masked"), objective=NEXT_SENTENCE)
    )
    begin(settings(line_store, str(tmp_path / "both"), objective=NEXT_SENTENCE))
    said = refusal(settings(line_store, str(tmp_path / "both")))
    assert f"has weights without a place in the model: {HEAD_OF_SENTENCES}" in said and "drop_heads" in said


def test_weights_of_the_body_are_never_optional(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    dense = weights.pop("bert.encoder.layer.1.output.dense.weight")
    weights |= {
        "bert.encoder.layer.2.output.dense.weight": dense,
        "bert.encoder.layer.0.output.dense.bias": torch.ones(32),
    }
    save_file(weights, file, metadata={"format": "pt"})
    allowed = {"folder": str(tmp_path / "model"), "new_heads": True, "drop_heads": True}
    where = f"start_from: {tmp_path}/model: "
    assert refusal(settings(store, allowed)).splitlines() == [
        where + "has no bert.encoder.layer.1.output.dense.weight",
        where + "has weights without a place in the model: bert.encoder.layer.2.output.dense.weight",
        where + "its weights do not fit its own config.json: bert.encoder.layer.0.output.dense.bias (32,) for (16,)",
    ]


# ---------------------------------------------------------------------------------------------- what does not fit


def test_settings_that_differ_are_all_named(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m", num_hidden_layers=3, hidden_act="relu", layer_norm_eps=1e-5, vocab_size=210)
    where = f"start_from: {tmp_path}/m: "
    assert refusal(settings(store, str(tmp_path / "m"))).splitlines() == [
        where + "its vocabulary has 210 entries, the stores' 200; prepare the stores "
        "with the folder's tokenizer, or set start_from.vocabulary",
        where + "num_hidden_layers is 3 there and 2 in the parameters; set it to the folder's",
        where + 'hidden_act is "relu" there and "gelu" in the parameters; set it to the folder\'s',
        where + "layer_norm_eps is 1e-05 there and 1e-12 in the parameters; set it to the folder's",
        where + "weights of another shape: bert.embeddings.word_embeddings.weight (210, 16) for (200, 16), "
        "cls.predictions.bias (210,) for (200,)",
    ]


def test_dropout_is_the_runs_own_with_a_note(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m", hidden_dropout_prob=0.2)
    begin(settings(store, str(tmp_path / "m")))
    assert begin.notes == [  # type: ignore[attr-defined]
        f"start_from: {tmp_path}/m: hidden_dropout_prob is 0.2 there and 0.0 in the parameters; "
        "the parameters' value is used"
    ]


def save_tokenizer(folder: Path, tokens: list[str]) -> None:
    from tokenizers import Tokenizer, models

    model = models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[UNK]").save_pretrained(folder)


def test_another_tokenizer_of_the_same_size_is_named(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    save_bert(tmp_path / "m")
    tokens = ["[PAD]", "[UNK]", *(f"字{index}" for index in range(2, 200))]
    save_tokenizer(copy / "tokenizer", tokens)
    rewrite_store_json(copy)
    save_tokenizer(tmp_path / "m", tokens)
    begin(settings(copy, str(tmp_path / "m")))
    tokens[7], tokens[9] = tokens[9], "江戸"
    save_tokenizer(tmp_path / "m", tokens)
    assert refusal(settings(copy, str(tmp_path / "m"))) == (
        f"start_from: {tmp_path}/m: its tokenizer differs from the stores': 2 ids mean something else "
        '(7 is "字9" there and "字7" here; 9 is "江戸" there and "字9" here); '
        "prepare the stores with the folder's tokenizer, or set start_from.vocabulary"
    )
    (tmp_path / "m/tokenizer.json").write_text("{")
    assert "its tokenizer (tokenizer.json) cannot be compared" in refusal(settings(copy, str(tmp_path / "m")))


def test_a_folder_with_its_own_code_is_compared_without_running_it(store: Path, tmp_path: Path) -> None:
    """Its weights are read by the plugin's class, its tokenizer with that class's config."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    save_bert(tmp_path / "m")
    tokens = ["[PAD]", "[UNK]", *(f"字{index}" for index in range(2, 200))]
    save_tokenizer(copy / "tokenizer", tokens)
    rewrite_store_json(copy)
    tokens[7] = "江戸"
    save_tokenizer(tmp_path / "m", tokens)
    file = tmp_path / "m/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoConfig": "code.Config"}}))
    (tmp_path / "m/code.py").write_text("raise SystemExit('it was run')")
    said = refusal(settings(copy, str(tmp_path / "m")))
    assert 'means something else (7 is "江戸" there and "字7" here)' in said.replace("mean ", "means ")


def test_another_family_is_refused(store: Path, tmp_path: Path) -> None:
    save_electra(tmp_path / "e")
    said = refusal(settings(store, str(tmp_path / "e/generator")))
    assert said.endswith(
        'is a model of type "electra", the architecture is of type "bert"; expected a folder with a model of this type'
    )


@pytest.mark.slow
def test_embeddings_that_are_shared_must_agree(store: Path, tmp_path: Path) -> None:
    save_electra(tmp_path / "e", alike=False)
    said = refusal(electra(store, str(tmp_path / "e")))
    assert said.startswith(f"start_from: {tmp_path}/e/discriminator: electra.embeddings.word_embeddings.weight, ")
    assert f"and the same in {tmp_path}/e/generator are one shared weight in the model, but they differ" in said
    assert len(said.splitlines()) == 1
    begin(electra(store, str(tmp_path / "e"), sharing="none"))


def test_models_that_an_objective_computes_need_its_own_load_models(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_electra(tmp_path / "e")
    monkeypatch.setattr(registry().component("objectives", "replaced_token"), "load_models", Objective.load_models)
    assert refusal(electra(store, str(tmp_path / "e"), sharing="disentangled")) == (
        f"start_from: {tmp_path}/e/discriminator: this model cannot be set: the objective computes it from other "
        "weights when it exports, and its load_models does not set those weights from it"
    )


def test_a_tied_head_with_its_own_weights_is_refused(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    save_file({**load_file(file), "cls.predictions.decoder.weight": torch.ones(200, 16)}, file, {"format": "pt"})
    said = refusal(settings(store, str(tmp_path / "m")))
    assert said.endswith("cls.predictions.decoder.weight differs from the weight with which the model shares it")


def test_folders_without_a_model_are_refused(store: Path, tmp_path: Path) -> None:
    said = refusal(settings(store, "tohoku-nlp/bert-base-japanese-v3"))
    assert "is not a folder" in said and "a run never downloads" in said
    assert "hf download tohoku-nlp/bert-base-japanese-v3 --local-dir tohoku-nlp/bert-base-japanese-v3" in said
    assert "no such folder" in refusal(settings(store, str(tmp_path / "gone")))
    assert "is a file" in refusal(settings(store, str(store / "tokens.bin")))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert f"terakoya export {tmp_path}/run --out DIR" in refusal(settings(store, str(tmp_path / "run")))
    save_electra(tmp_path / "e")
    assert "it holds discriminator/, generator/; name one of these" in refusal(settings(store, str(tmp_path / "e")))
    pair = {"generator": "x", "critic": "y"}
    expected = 'expected one folder for each of "discriminator", "generator"; got "critic", "generator"'
    assert expected in refusal(electra(store, pair))
    assert "since the objective trains one model" in refusal(settings(store, {"generator": "x"}))


def test_damaged_folders_are_refused(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    raw, file = settings(store, str(tmp_path / "m")), tmp_path / "m/model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    assert "model.safetensors: ends within its header, or is no file of safetensors; download" in refusal(raw)
    file.unlink()
    assert "weights cannot be read: Error no file named model.safetensors" in refusal(raw)
    (tmp_path / "m/pytorch_model.bin").write_bytes(b"PK")
    assert "weights cannot be read" in refusal(raw)
    (tmp_path / "m/config.json").write_text("{")
    assert "config.json cannot be read" in refusal(raw)


# ------------------------------------------------------------------------------------------- runs and their record


@pytest.mark.slow
def test_a_resumed_run_and_an_export_do_not_need_the_folder(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    raw = settings(store, str(tmp_path / "m"), checkpoint={"save_steps": 1})
    train_in_this_process(Parameters.from_dict(raw, source="test"), tmp_path / "run")
    facts = checkpoints.read_manifest(tmp_path / "run/checkpoints/step-00000001")["started_from"]
    assert facts[""]["folder"] == str(tmp_path / "m") and len(facts[""]["files"]["model.safetensors"]) == 64
    shutil.rmtree(tmp_path / "m")
    train_in_this_process(Parameters.from_dict({**raw, "max_steps": 3}, source="test"), tmp_path / "run")
    assert sorted(toy.records(tmp_path / "run")) == [1, 2, 3]
    assert checkpoints.read_manifest(tmp_path / "run/checkpoints/step-00000003")["started_from"] == facts
    export(tmp_path / "run", tmp_path / "exported")
    BertForMaskedLM.from_pretrained(tmp_path / "exported", local_files_only=True)


@pytest.mark.slow
def test_a_dry_run_reads_the_folder(store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m", num_hidden_layers=3)
    said = toy.train(settings(store, str(tmp_path / "m")), tmp_path / "run", "--dry-run", code=2)
    assert "error: start_from:" in said and "num_hidden_layers is 3 there and 2" in said
    fitting = settings(store, str(tmp_path / "m"), architecture={"num_hidden_layers": 3})
    assert "one step: loss" in toy.train(fitting, tmp_path / "run", "--dry-run")
    assert not (tmp_path / "run").exists()
