"""Models and adapters that are written while training goes on have the bits of those for which it waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from saved_weights import FAULTS
from test_lora import make, run

from terakoya.runs import checkpoints
from terakoya.training import saving
from terakoya.training.model.thread_generator import ThreadGenerator

TWO = {"batch_size": {"0": 9, "1": 7}}
MANIFEST = "manifest.json"
EVERY = {"save_steps": 2, "keep": 5, "model": "every"}


def files(checkpoint: Path) -> dict[str, bytes]:
    """The content of every file that other programs read."""
    others = [path for path in checkpoint.rglob("*") if path.is_file() and path.parent.name != "state"]
    return {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in others if path.name != MANIFEST}


def assert_same(waited: Path, background: Path, *folders: str) -> None:
    """Losses, the whole state and all other files are the same; every checkpoint has the `folders`."""
    assert toy.losses(waited) == toy.losses(background)
    saved, expected = (checkpoints.list_checkpoints(out / "checkpoints") for out in (background, waited))
    assert len(saved) == len(expected) > 1
    for (_, mine), (_, theirs) in zip(saved, expected, strict=True):
        assert all((mine / folder).is_dir() for folder in folders)
        assert files(mine) == files(theirs)
        for kind in ("model", "optimizer"):
            first, second = toy.saved(mine, kind), toy.saved(theirs, kind)
            assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        pytest.param("gpt2", {"lora_dropout": 0.2}, marks=pytest.mark.nightly),
        ("llama", {"modules_to_save": ["lm_head", "norm"]}),
    ],
)
def test_adapters_and_merged_models(
    kind: str, lora: dict[str, Any], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are written after further steps, which change the weights of the run."""
    raw = make(kind, store, tmp_path / "base", max_steps=5, lora=lora)
    run({**raw, "checkpoint": EVERY}, tmp_path / "waited")
    threads, real = [], saving.write_model_folders

    def write_late(folder: Path, **options: Any) -> None:
        time.sleep(0.2)
        threads.append(threading.current_thread().name)
        real(folder, **options)

    monkeypatch.setattr(saving, "write_model_folders", write_late)
    run({**raw, "checkpoint": {**EVERY, "async_save": True}}, tmp_path / "background")
    assert len(threads) == 3 and all(name.startswith("checkpoint") for name in threads)
    assert_same(tmp_path / "waited", tmp_path / "background", "adapter", "model")


@pytest.mark.nightly
def test_models_of_which_no_process_has_all(store: Path, tmp_path: Path) -> None:
    """The module that is built for them draws random numbers beside those of dropout."""
    raw = toy.parameters(store, max_steps=6, parallel={"engine": "fsdp"}, **TWO)
    raw["architecture"] = {**raw["architecture"], "hidden_dropout_prob": 0.1}
    for name, saves in (("waited", EVERY), ("background", {**EVERY, "async_save": True})):
        toy.train({**raw, "checkpoint": saves}, tmp_path / name, nodes=(1, 1))
    assert_same(tmp_path / "waited", tmp_path / "background", "model")


@pytest.mark.nightly
def test_killed_before_the_second_checkpoint_has_its_name(store: Path, tmp_path: Path) -> None:
    """The first one stays, with its adapter, and the run goes on from there."""
    raw = make("gpt2", store, tmp_path / "base", max_steps=6, checkpoint={**EVERY, "async_save": True})
    toy.train(raw, tmp_path / "straight", plugins=FAULTS)
    environment = {"FAULT": "save:manifest@2", "FAULT_RANK": "0"}
    started = toy.start(raw, tmp_path / "cut", nodes=(1,), plugins=FAULTS, environment=environment)
    toy.finish(started, code=None)
    assert [each.process.exitcode for each in started] == [-signal.SIGKILL]
    ((step, folder),) = checkpoints.list_checkpoints(tmp_path / "cut/checkpoints")
    assert step == 2 and not checkpoints.find_problems(folder) and (folder / "adapter").is_dir()
    assert "at step 2" in toy.train(raw, tmp_path / "cut", plugins=FAULTS)
    assert_same(tmp_path / "straight", tmp_path / "cut", "adapter", "model")


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "normal_": lambda: torch.empty(3).normal_(),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "randn": partial(torch.randn, 3),
    "rand": partial(torch.rand, 3),
    "randint": partial(torch.randint, 0, 9, (3,)),
    "randperm": partial(torch.randperm, 9),
    "rand_like": lambda: torch.rand_like(torch.zeros(3)),
    "multinomial": lambda: torch.ones(9).multinomial(3),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(3)),
    "a layer": lambda: torch.nn.Linear(3, 3).weight.detach(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_from_its_own_generator(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadGenerator():
        first, second = DRAWS[name](), DRAWS[name]()
    assert not torch.equal(first, second) or name == "randint"
    assert torch.equal(torch.get_rng_state(), before)
