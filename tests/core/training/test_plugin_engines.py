"""An engine of a plugin: it builds runs of several processes with its name, and is named where it is missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy

from terakoya.components import ModuleBuild
from terakoya.config.parallel import Parallel
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import PLUGINS_VARIABLE, load, registry
from terakoya.plugins.run_record import check_plugins, record_plugins
from terakoya.training.checkpoint.restoring import saved_parameters
from terakoya.training.engines.build import build, find_plugin_engine, holds_parts
from terakoya_contract.toy import VOCABULARY
from terakoya_schemas.parameters import json_schema

pytestmark = pytest.mark.usefixtures("fresh_plugins")

STRANGE = """
from terakoya import hookimpl

@hookimpl
def register_engines():
    return {
        "fsdp": lambda inputs: ("strange", inputs),
        "ddp": lambda inputs: ("of replicas", inputs),
        "deepspeed": lambda inputs: ("alone", inputs),
        "mine": tuple,
    }
"""
TWO: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
ONE: Any = SimpleNamespace(world_size=1, device=torch.device("cpu"))


@pytest.fixture
def strange(tmp_path: Path) -> str:
    file = tmp_path / "strange.py"
    file.write_text(STRANGE, encoding="utf-8")
    return str(file)


def test_a_strange_engine_is_built_by_its_name(store: Path, strange: str) -> None:
    load([strange], ["parallel"])
    module = torch.nn.Linear(2, 2)

    def built(context: Any, **parallel: Any) -> Any:
        raw = toy.parameters(store, precision="fp16", parallel=parallel)
        run = ModuleBuild(Parameters.from_dict(raw, source="test"), VOCABULARY, context)
        return build(module, run, micro_steps=3, micro_batch_size=4)

    for parallel, name in (({"engine": "fsdp"}, "strange"), ({"cp_size": 2}, "of replicas")):
        said, inputs = built(TWO, **parallel)
        assert (said, inputs.module, inputs.vocabulary, inputs.context) == (name, module, VOCABULARY, TWO)
        assert (inputs.micro_steps, inputs.micro_batch_size, inputs.deferred) == (3, 4, None)
        assert inputs.parameters.parallel == Parallel(**parallel) and inputs.scaler.scale > 1
        raw = toy.parameters(store, parallel=parallel)
        assert [holds_parts(Parameters.from_dict(raw, source="test"), each) for each in (ONE, TWO)] == [False, True]
        assert find_plugin_engine(Parallel(**parallel), processes=1) is None
    assert built(ONE, engine="deepspeed", zero_stage=1)[0] == "alone"
    raw = toy.parameters(store, parallel={"engine": "deepspeed", "zero_stage": 1})
    assert not holds_parts(Parameters.from_dict(raw, source="test"), TWO)
    assert find_plugin_engine(Parallel(), processes=2) is None


def test_a_strange_engine_says_what_does_not_go_together(store: Path, strange: str) -> None:
    says = "\n\ndef build(inputs): ...\nbuild.find_conflicts = lambda each: ['seed: expected 2'] * (each.seed != 2)\n"
    text = STRANGE.replace('lambda inputs: ("strange", inputs)', "build")
    Path(strange).write_text(f"{text}{says}", encoding="utf-8")
    load([strange], ["parallel"])
    for parallel, seed in (({}, 1), ({"engine": "fsdp"}, 2), ({"tp_size": 2}, 1)):
        Parameters.from_dict(toy.parameters(store, parallel=parallel, seed=seed), source="test")
    with pytest.raises(UserError, match="seed: expected 2"):
        Parameters.from_dict(toy.parameters(store, parallel={"engine": "fsdp"}, seed=1), source="test")


def test_a_plugin_names_an_engine_of_its_own(store: Path, strange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = load([strange], ["parallel"])
    raw = toy.parameters(store, parallel={"engine": "mine"})
    assert find_plugin_engine(Parameters.from_dict(raw, source="test").parallel, processes=2) is tuple
    assert json_schema(registry)["$defs"]["Parallel"]["properties"]["engine"]["enum"] == [
        "ddp", "deepspeed", "fsdp", "mine",
    ]  # fmt: skip
    slip = 'test: parallel.engine: expected the name of an engine, got "mien"; did you mean "mine"'
    with pytest.raises(UserError, match=slip):
        Parameters.from_dict({**raw, "parallel": {"engine": "mien"}}, source="test")
    monkeypatch.delenv(PLUGINS_VARIABLE)
    load()
    with pytest.raises(UserError, match='got "mine"; known: "ddp", "deepspeed", "fsdp"'):
        Parameters.from_dict(raw, source="test")
    saved = saved_parameters(Path("run"), {"parameters": raw})
    assert saved.parallel == Parallel(), "a finished model needs no engine"


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"engine": "fsdp"}, "fsdp"),
        ({"tp_size": 2}, "ddp, tp_size 2"),
        ({"engine": "deepspeed", "zero_stage": 1}, "deepspeed"),
    ],
)
def test_a_missing_engine_is_answered_with_its_family(parallel: dict[str, Any], said: str) -> None:
    load(without=["parallel"])
    with pytest.raises(
        UserError, match=f'parallel: no plugin has the engine of "{said}"; it belongs to the family parallel,'
    ):
        find_plugin_engine(Parallel(**parallel), processes=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return {", "return [], {", "register_engines: expected a mapping of name to function, got tuple"),
        ('lambda inputs: ("strange", inputs)', "1", '"fsdp": expected a function, got 1'),
        ("", "", "is registered twice"),
    ],
)
def test_a_wrong_engine_is_an_error_that_names_the_plugin(strange: str, old: str, new: str, message: str) -> None:
    Path(strange).write_text(STRANGE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=f"plugin strange .*{message}"):
        load([strange])


def test_a_run_records_the_plugin_of_its_engine(strange: str) -> None:
    load([strange], ["parallel"])
    sharded: dict[str, Any] = {"parallel": {"engine": "fsdp", "tp_size": 1}}
    record = record_plugins(registry(), sharded)
    assert [(each["name"], each["components"]) for each in record] == [("strange", ["engines/fsdp"])]
    assert record_plugins(registry(), {"parallel": {"engine": "ddp", "tp_size": 1}}) == []
    (replicas,) = record_plugins(registry(), {"parallel": {"engine": "ddp", "tp_size": 2}})
    assert replicas["components"] == ["engines/ddp"]
    assert check_plugins(registry(), record, sharded) == ([], [])
    others = SimpleNamespace(plugins=[], registrations={}, engines={}, transforms={}, watches={}, broken=[])
    assert "strange (--plugin: engines/fsdp) is missing" in check_plugins(others, record, sharded).missing[0]  # type: ignore[arg-type]
    assert check_plugins(others, record, sharded, events=False) == ([], []), "a finished model needs no engine"  # type: ignore[arg-type]
    assert check_plugins(others, record, {"parallel": {"engine": "ddp"}}) == ([], []), "another engine goes on"  # type: ignore[arg-type]
