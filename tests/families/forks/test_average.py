"""Averages of models: numpy's sums of the same files, loaded by plain Transformers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from terakoya.atomic_files import load_hashed_json
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import TemporaryFailure, UserError
from terakoya.runs.checkpoints import list_checkpoints
from terakoya.toolkit.formats import folder_digests
from terakoya.training.setup import train_in_this_process
from terakoya_forks import average as module
from terakoya_forks.average import average


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 2, 4 and 6, the first without a `model/`."""
    out = tmp_path_factory.mktemp("averaged") / "run"
    settings = toy.parameters(store, max_steps=6, checkpoint={"save_steps": 2, "keep": 3})
    never = {**settings, "max_steps": 2, "checkpoint": {"save_steps": 2, "keep": 3, "model": "never"}}
    for parameters in (never, settings):
        train_in_this_process(Parameters.from_dict(parameters, source="test"), out)
    assert [(folder / "model").is_dir() for _, folder in list_checkpoints(out / "checkpoints")] == [False, True, True]
    return out


@pytest.fixture(scope="module")
def models(run: Path) -> list[Path]:
    """The exports of the three checkpoints."""
    for step in (2, 4, 6):
        export(Path(f"{run}@{step}"), run.parent / f"model{step}")
    return [run.parent / f"model{step}" for step in (2, 4, 6)]


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    write = module._write_model

    def remove_and_write(*given: Any) -> None:
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
        write(*given)

    monkeypatch.setattr(module, "_write_model", remove_and_write)
    with pytest.raises(TemporaryFailure, match=r"step-00000006: was removed by checkpoint\.keep of its run"):
        average([tmp_path / "run"], tmp_path / "mean", last=2)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_mean(out: Path, models: list[Path], shares: list[float]) -> None:
    """Each tensor is numpy's mean in long double, but for the last bit of float32."""
    states, mean = [weights_of(model) for model in models], weights_of(out)
    assert mean.keys() == states[0].keys() and len(mean) > 20
    for name, tensor in mean.items():
        exact = sum(np.longdouble(share) * state[name].numpy() for share, state in zip(shares, states, strict=True))
        np.testing.assert_array_max_ulp(tensor.numpy(), np.asarray(exact, np.float32), maxulp=1)
        assert tensor.dtype == torch.float32 and not torch.equal(tensor, states[0][name])


def test_the_last_checkpoints_of_a_run(run: Path, models: list[Path], tmp_path: Path) -> None:
    done = average([run], tmp_path / "mean", last=3)
    assert [(each.step, each.share) for each in done] == [(step, 1 / 3) for step in (2, 4, 6)]
    assert_mean(tmp_path / "mean", models, [1 / 3] * 3)
    record = load_hashed_json((tmp_path / "mean/average.json").read_bytes())["models"]
    assert [Path(each["folder"]).name for each in record] == [f"step-{step:08d}" for step in (2, 4, 6)]
    assert folder_digests.find_changes(tmp_path / "mean") == []
    assert [each.name for each in tmp_path.iterdir()] == ["mean"]  # nothing temporary stays

    theirs = [AutoModelForMaskedLM.from_pretrained(model, local_files_only=True) for model in models]
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path / "mean", local_files_only=True).eval()
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in theirs), strict=True):
            parameters[0].copy_(torch.stack([each.double() for each in parameters]).mean(0))
    inputs = {"input_ids": torch.randint(6, 200, (2, 12))}
    with torch.no_grad():
        assert (ours(**inputs).logits - theirs[0].eval()(**inputs).logits).abs().max() < 1e-6
    assert (tmp_path / "mean/size.txt").is_file(), "the tokenizer's files are there"


def test_weights_count_and_folders_mix_with_checkpoints(run: Path, models: list[Path], tmp_path: Path) -> None:
    average([models[0], Path(f"{run}@4"), run], tmp_path / "mean", weights=[1, 2, 5])
    assert_mean(tmp_path / "mean", models, [1 / 8, 2 / 8, 5 / 8])


def test_what_is_said_of_the_first_model_is_not_said_of_the_average(models: list[Path], tmp_path: Path) -> None:
    first = Path(shutil.copytree(models[0], tmp_path / "first"))
    for name in ("README.md", "training.svg", "terakoya_scores.json", "pytorch_model.bin", "model.bin"):
        (first / name).write_text("{}")
    average([first, models[1]], tmp_path / "mean")
    before = {each.name for each in models[0].iterdir()}
    assert {each.name for each in (tmp_path / "mean").iterdir()} == before | {"average.json"}


def changed(model: Path, folder: Path, **tensors: torch.Tensor) -> Path:
    """A copy of `model` with other tensors."""
    shutil.copytree(model, folder)
    (folder / folder_digests.NAME).unlink()
    save_file({**weights_of(model), **tensors}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_half_precision_and_numbers_that_are_no_weights(models: list[Path], tmp_path: Path) -> None:
    ids = torch.arange(5)
    halves = [
        changed(model, tmp_path / f"half{number}", ids=ids, small=weights_of(model)["cls.predictions.bias"].bfloat16())
        for number, model in enumerate(models)
    ]
    average(halves, tmp_path / "mean")
    mean = weights_of(tmp_path / "mean")
    exact = torch.stack([weights_of(half)["small"].double() for half in halves]).mean(0)
    assert mean["small"].dtype == torch.bfloat16 and torch.equal(mean["small"], exact.bfloat16())
    assert torch.equal(mean["ids"], ids)
    other = changed(models[1], tmp_path / "other", ids=ids + 1, small=mean["small"])
    with pytest.raises(UserError, match=r"other: ids is int64 and differs from .*half0: only weights have a mean"):
        average([halves[0], other], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_has_no_average_is_refused(run: Path, models: list[Path], tmp_path: Path) -> None:
    new, first = tmp_path / "new", models[0]

    def refused(said: str, *sources: Path, **options: object) -> None:
        with pytest.raises(UserError, match=said) as caught:
            average(sources, new, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value) and not new.exists()

    refused("expected at least two models to average, got one", first)
    refused("--weights: expected 2 numbers, one for each model, got 1", first, first, weights=[1])
    refused("--weights: expected positive numbers, got 1, 0", first, first, weights=[1, 0])
    refused("expected 4 whole checkpoints for --last, found 3", run, last=4)
    refused("--last takes checkpoints of a run, got a Transformers model", first, last=2)
    refused("expected a run or a checkpoint, got no such folder", first, tmp_path / "missing")
    config = changed(first, tmp_path / "config")
    text = (config / "config.json").read_text().replace('"num_attention_heads": 2', '"num_attention_heads": 4')
    (config / "config.json").write_text(text)
    refused("another architecture than .*: num_attention_heads 4 instead of 2", first, config)
    bias = weights_of(first)["cls.predictions.bias"]
    extra = changed(first, tmp_path / "extra", more=bias)
    refused("extra: has other tensors than .*: only .*extra has more", first, extra)
    short = changed(first, tmp_path / "short", **{"cls.predictions.bias": bias[:-1].clone()})
    refused(r"short: cls\.predictions\.bias has the shape \[\d+\], in .* \[\d+\]", first, short)
    infinite = changed(first, tmp_path / "infinite", **{"cls.predictions.bias": bias / 0})
    refused("bias: a weight is not finite", first, infinite)
    ours, theirs = changed(first, tmp_path / "ours"), changed(first, tmp_path / "theirs")
    for folder, pieces in ((ours, "ab"), (theirs, "ba")):
        tokenizer = Tokenizer(WordLevel({"[UNK]": 0, **{piece: id for id, piece in enumerate(pieces, 1)}}, "[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    refused('another vocabulary than .*2 ids mean something else: id 1 is "a" in .*ours, "b" in .*theirs', ours, theirs)
    spoilt = tmp_path / "spoilt"
    shutil.copytree(first, spoilt)
    with (spoilt / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    refused("changed since it was exported", first, spoilt)
