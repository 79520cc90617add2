"""Transforms of a run's module that a plugin has: they come in their stages, are recorded, and are named where they are
missing. Initial weights of a plugin, likewise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import start_folders
import torch
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import load
from terakoya.plugins.run_record import check_plugins
from terakoya.training.setup import train_in_this_process

pytestmark = pytest.mark.usefixtures("fresh_plugins")

STRANGE = """
from terakoya import hookimpl
from terakoya.components import ModuleTransform

seen, checked, refreshed = [], [], []

class Copies:
    facts = {"strange": True}
    def __init__(self, module):
        self.weights = list(module.parameters())
        self.copies = [each.detach().clone() for each in self.weights]
    def refresh(self):
        refreshed.append([bool((a != b).any()) for a, b in zip(self.copies, self.weights)])
        self.copies = [each.detach().clone() for each in self.weights]
    def add_in_products(self, module):
        return []

def at(stage):
    def apply(module, build):
        fewest = next(module.parameters())
        seen.append((stage, fewest.requires_grad, "forward" in vars(module), build.compiled, module.training))
        return Copies(module) if stage == "engine" else None
    return ModuleTransform(stage, lambda parameters: parameters.seed == 7, apply, check=checked.append)

@hookimpl
def register_module_transforms():
    return {f"strange_{stage}": at(stage) for stage in ("compile", "engine", "precision", "adapt", "freeze")}

@hookimpl
def register_initial_weights():
    def grow(start):
        for each in start.source.parameters():
            each.data.mul_(2)
        return start.source, f"times {len(start.settings.ways_to_grow) + 1}"
    return {"grow": grow}
"""


@pytest.fixture
def strange(tmp_path: Path) -> str:
    file = tmp_path / "strange.py"
    file.write_text(STRANGE, encoding="utf-8")
    return str(file)


def parse(raw: dict[str, Any]) -> Parameters:
    return Parameters.from_dict(raw, source="test")


def manifest(out: Path) -> Any:
    return json.loads(sorted(out.glob("checkpoints/*/manifest.json"))[-1].read_text())


def test_transforms_come_in_their_stages_after_those_of_the_core(store: Path, strange: str, tmp_path: Path) -> None:
    registry = load([strange], ["growth"])
    (module,) = (each.module for each in registry.plugins if each.name == "strange")
    wanted = parse(toy.parameters(store, seed=7, frozen_layers=0, precision="bf16", autocast=True, max_steps=2))
    train_in_this_process(wanted, tmp_path / "wanted")
    assert module.seen == [  # type: ignore[attr-defined]
        ("freeze", False, False, "off", True), ("adapt", False, False, "off", True),
        ("precision", False, False, "off", True), ("engine", False, True, "off", True),
        ("compile", False, True, "off", True),
    ]  # fmt: skip
    assert len(module.checked) == 5 and [any(each) for each in module.refreshed] == [True, True]  # type: ignore[attr-defined]
    found = manifest(tmp_path / "wanted")
    (record,) = (each for each in found["plugins"] if each["name"] == "strange")
    assert record["components"][-1] == "transforms/strange_freeze" and len(record["components"]) == 5
    assert found["world"]["strange"] is True
    others = SimpleNamespace(plugins=[], registrations={}, engines={}, transforms={}, watches={}, broken=[])
    (missing,) = check_plugins(others, [record], found["parameters"]).missing  # type: ignore[arg-type]
    assert "transforms/strange_freeze) is missing" in missing
    assert check_plugins(others, [record], found["parameters"], events=False) == ([], [])  # type: ignore[arg-type]
    train_in_this_process(parse(toy.parameters(store, seed=8, max_steps=1)), tmp_path / "other")
    assert len(module.seen) == 5 and "strange" not in {each["name"] for each in manifest(tmp_path / "other")["plugins"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{f"strange_{stage}"', '[], {f"strange_{stage}"', "expected a mapping of name to ModuleTransform, got tuple"),
        ("at(stage) for", "1 for", '"strange_compile": expected a ModuleTransform, got 1'),
        ('{f"strange_{stage}"', '{"fp8"', '"fp8" is registered twice'),
        ('{"grow": grow}', '{"grow": 1}', 'register_initial_weights: "grow": expected a function, got 1'),
    ],
)
def test_what_is_no_transform_is_an_error_that_names_the_plugin(strange: str, old: str, new: str, message: str) -> None:
    Path(strange).write_text(STRANGE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=f"plugin strange .*{re.escape(message)}"):
        load([strange], ["growth"])


def test_a_precision_that_no_plugin_has_is_answered_with_its_family(store: Path, tmp_path: Path) -> None:
    load(without=["precision"])
    with pytest.raises(UserError, match='precision: no plugin has "fp8"; it belongs to the family precision, which'):
        train_in_this_process(parse(toy.parameters(store, precision="fp8")), tmp_path)


def test_bf16_without_the_family_is_autocast(store: Path, tmp_path: Path) -> None:
    raw = toy.parameters(store, precision="bf16", max_steps=2)
    train_in_this_process(parse(raw), tmp_path / "stream")
    train_in_this_process(parse({**raw, "autocast": True}), tmp_path / "autocast")
    load(without=["precision"])
    train_in_this_process(parse(raw), tmp_path / "without")
    stream, autocast, without = (
        toy.saved(next((tmp_path / name / "checkpoints").glob("step-*"))) for name in ("stream", "autocast", "without")
    )
    assert autocast and all(torch.equal(without[name], value) for name, value in autocast.items())
    assert not all(torch.equal(without[name], value) for name, value in stream.items())


def test_initial_weights_of_a_strange_plugin(store: Path, strange: str, tmp_path: Path) -> None:
    load([strange], ["growth"])
    raw = start_folders.settings(store, None)
    start_folders.save_bert(tmp_path / "bert")
    once, twice = (
        dict(start_folders.begin({**raw, "start_from": {"folder": str(tmp_path / "bert"), **more}}).named_parameters())
        for more in ({}, {"grow": "stack"})
    )
    assert all(torch.equal(2 * value, twice[name]) for name, value in once.items())
    assert start_folders.begin.notes == [f"start_from: {tmp_path / 'bert'}: times 2"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [{"grow": "stack"}, {"vocabulary": "transplant"}])
def test_missing_initial_weights_are_answered_with_their_family(store: Path, tmp_path: Path, change: Any) -> None:
    load(without=["growth"])
    start_folders.save_bert(tmp_path / "bert")
    said = start_folders.refusal(start_folders.settings(store, {"folder": str(tmp_path / "bert"), **change}))
    assert f"start_from.{next(iter(change))}: no plugin has it; it belongs to the family growth, which" in said
