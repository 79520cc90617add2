"""The comparison of seconds until a loss, at toy size, and the variants of the sweep that chose its recipe."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from selection import at_night

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.store.writer import write_store
from terakoya.training.model.build import build_module

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import time_to_loss

    yield time_to_loss


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 60 documents with a WordPiece tokenizer of 40 pieces."""
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + number) for number in range(26)), *"012345678"]
    (tokenizer / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}), encoding="utf-8")
    generator = np.random.default_rng(0)
    documents = [generator.integers(5, len(pieces), size=generator.integers(5, 50)) for _ in range(60)]
    vocabulary = Vocabulary(size=len(pieces), pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
    write_store(
        folder / "store",
        ([document] for document in documents),
        vocabulary=vocabulary,
        unit="document",
        word_starts=([np.ones(len(document), bool)] for document in documents),
        tokenizer_folder=tokenizer,
    )
    return folder / "store"


def arguments(bench: ModuleType, store: Path, family: str, folder: Path) -> object:
    where = ["--store", str(store), "--validation", str(store), "--curves", str(folder), "--jsts", str(folder)]
    return bench._arguments(["--family", family, *where, "--tiny"])


@pytest.mark.parametrize("family", at_night(["bert", "gpt"], always=["bert"]))
def test_both_legs_are_measured_alike(bench: ModuleType, store: Path, tmp_path: Path, family: str) -> None:
    settings = arguments(bench, store, family, tmp_path)
    raw = bench.ours(settings)
    mine = bench.train_ours(0, raw).facts
    theirs = bench.train_peer(0, raw, vars(settings)).facts
    for leg in (mine, theirs):
        points = leg["points"]
        assert [point["step"] for point in points] == [0, 1, 2]
        assert points[0]["cpu"] == points[0]["tokens"] == 0 < points[1]["wall"] < points[2]["wall"]
    assert mine["parameters"] == pytest.approx(theirs["parameters"], rel=0.15)
    # Our run's own validation before the first step is that of the same weights, measured as the peer's are.
    parameters = Parameters.from_dict(raw, source="test")
    torch.manual_seed(0)
    model = build_module(parameters, bench.TokenStore.open(store).facts.vocabulary).model
    loss, accuracy = bench.measure(model, bench.validation_batches(raw))
    assert mine["points"][0]["loss"] == pytest.approx(loss, abs=1e-5)
    assert mine["points"][0]["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def write_pairs(folder: Path) -> None:
    """Writes JSTS's two files with twelve pairs of letters each."""
    for name in ("train", "valid"):
        pairs = [
            {"sentence1": f"{chr(97 + number)} b", "sentence2": "b c", "label": number / 3} for number in range(12)
        ]
        with gzip.open(folder / f"{name}-v1.3.json.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(pair) + "\n" for pair in pairs)


def test_discriminators_of_both_legs_are_kept_and_fine_tuned_alike(
    bench: ModuleType, store: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForTokenClassification, ElectraForPreTraining

    settings = arguments(bench, store, "electra", tmp_path)
    write_pairs(tmp_path)
    raw = bench.ours(settings)
    legs = {
        "terakoya": bench.train_ours(0, raw, tmp_path / "terakoya").facts,
        "Trainer": bench.train_peer(0, raw, vars(settings), tmp_path / "Trainer").facts,
    }
    sizes = {}
    for (name, leg), kind in zip(legs.items(), (AutoModelForTokenClassification, ElectraForPreTraining), strict=True):
        points = leg["points"]
        assert [point["step"] for point in points] == [0, 1, 2] and points[0]["cpu"] == 0 < points[2]["cpu"]
        models = []
        for point in points:
            kept = tmp_path / name / "0" / f"step-{point['step']}"
            model, loading = kind.from_pretrained(kept, output_loading_info=True)
            assert not loading["missing_keys"] and not loading["unexpected_keys"]
            models.append(model)
        first, last = (dict(model.named_parameters()) for model in (models[0], models[2]))
        assert all(bool((last[key] != value).any()) for key, value in first.items() if value.dim() == 2)
        sizes[name] = models[0].num_parameters()
        bench.score(points, tmp_path / name / "0", settings)
        assert all(-1.0 <= point["accuracy"] <= 1.0 for point in points)
        again = [dict(point) for point in points]
        bench.score(again, tmp_path / name / "0", settings)
        assert again == points
    assert sizes["terakoya"] == pytest.approx(sizes["Trainer"], rel=0.15)


def test_a_discriminator_that_knows_nothing_has_the_loss_of_a_coin(
    bench: ModuleType, store: Path, tmp_path: Path
) -> None:
    settings = arguments(bench, store, "electra", tmp_path)
    model = bench.peer_model(40, vars(settings))
    torch.nn.init.zeros_(model.discriminator.discriminator_predictions.dense_prediction.weight)
    before = torch.get_rng_state()
    loss, _ = bench.measure(model, bench.validation_batches(bench.ours(settings)))
    assert loss == pytest.approx(np.log(2), abs=1e-6)  # padding counts nowhere
    assert torch.equal(torch.get_rng_state(), before)


def test_electra_is_not_compared_without_pairs_to_fine_tune_on(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench._arguments(["--family", "electra", "--store", "S", "--validation", "V", "--curves", "C"])
    assert "--jsts" in capsys.readouterr().err


def test_a_score_is_reached_from_below(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{"cpu": 0.0, "accuracy": 0.2}, {"cpu": 10.0, "accuracy": 0.4}, {"cpu": 30.0, "accuracy": 0.3}]
    assert bench.loss_clock.reached(points, 0.3, "cpu", "accuracy") == pytest.approx(5.0)
    assert bench.loss_clock.reached(points, 0.5, "cpu", "accuracy") is None
    slow = [{"cpu": 0.0, "wall": 0.0, "accuracy": 0.2}, {"cpu": 90.0, "wall": 180.0, "accuracy": 0.3}]
    quick = [{"cpu": 0.0, "wall": 0.0, "accuracy": 0.2}, {"cpu": 20.0, "wall": 40.0, "accuracy": 0.4}]
    assert bench.verdict({"Trainer": [slow], "terakoya": [quick]}, None, "accuracy") == 0
    assert "accuracy 0.300; cpu: Trainer 90.0 s, terakoya 10.0 s, 9.0 x" in capsys.readouterr().out


def test_the_seconds_lie_on_the_line_between_two_validations(bench: ModuleType) -> None:
    points = [{"cpu": 0.0, "loss": 8.0}, {"cpu": 10.0, "loss": 6.0}, {"cpu": 30.0, "loss": 5.0}]
    assert bench.loss_clock.reached(points, 7.0) == pytest.approx(5.0)
    assert bench.loss_clock.reached(points, 5.25) == pytest.approx(25.0)
    assert bench.loss_clock.reached(points, 4.9) is None


def test_a_leg_that_never_gets_there_is_said_to_be_more_times_slower(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [{"cpu": 0.0, "wall": 0.0, "loss": 8.0}, {"cpu": 90.0, "wall": 180.0, "loss": 6.0}]
    quick = [{"cpu": 0.0, "wall": 0.0, "loss": 8.0}, {"cpu": 20.0, "wall": 40.0, "loss": 4.0}]
    assert bench.verdict({"Trainer": [slow], "terakoya": [quick]}, 5.0) == 1
    assert "Trainer not within 90 s, terakoya 15.0 s, more than 6.0 x" in capsys.readouterr().out
    assert bench.verdict({"Trainer": [slow], "terakoya": [quick]}, None) == 0
    assert "Trainer 90.0 s, terakoya 10.0 s, 9.0 x" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_every_variant_of_the_sweep_is_another_and_sees_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, store: Path, family: str
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import sweep_recipe

    sizes = argparse.Namespace(
        store=store, family=family, steps=32, batch_size=4, sequence_length=64, width=64, layers=2
    )
    variants = sweep_recipe.variants(family, 32, 4, 64)
    seen = set()
    for name, variant in variants.items():
        raw = sweep_recipe.parameters(variant, sizes)
        read = Parameters.from_dict(raw, source=name)
        phases = raw.get("phases", [{"steps": raw["max_steps"]}])
        tokens = [
            phase["steps"]
            * phase.get("batch_size", raw["batch_size"])["-1"]
            * phase.get("data", raw["data"])["sequence_length"]
            for phase in phases
        ]
        assert sum(tokens) == 32 * 4 * 64, name
        assert sum(phase["steps"] for phase in phases) == read.max_steps, name
        seen.add(json.dumps(raw, sort_keys=True))
    assert len(seen) == len(variants) > 10


def test_the_sweep_prints_what_a_variant_reached(
    monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], forks: None
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import sweep_recipe

    command = ["--store", str(store), "--work", str(tmp_path), "--steps", "4", "--batch-size", "4", "--width", "32"]
    command += ["--layers", "1", "--sequence-length", "16"]
    assert sweep_recipe.main([*command, "--seeds", "2", "--jobs", "2", "--only", "half the length first"]) == 0
    number = r"[+-]\d\.\d{3}"
    recipe, change = capsys.readouterr().out.splitlines()[2:]
    assert re.fullmatch(r"\| the recipe \| \d\.\d{3} \| \| \| \d+\.\d% \|", recipe)
    assert re.fullmatch(
        rf"\| half the length first \| {number} \| {number} to {number} \| \d\.\d{{3}} \| \d+\.\d% \|", change
    )
    compared = json.loads((tmp_path / "half_the_length_first" / "seed-2" / "compared.json").read_text())
    assert compared["of"]["parameters"]["phases"][0]["data"]["sequence_length"] == 8
    with pytest.raises(SystemExit):
        sweep_recipe.main([*command, "--family", "gpt", "--only", "window 128"])
    assert "expected some of adamw 1e-3" in capsys.readouterr().err
