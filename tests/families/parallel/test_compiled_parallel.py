"""Kinds of parallelism over compiled blocks have the bits of the same blocks uncompiled, and train what one process
trains uncompiled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import compiled_worker
import pytest
import torch
import toy
import worlds
from engine_runs import UNVALIDATED, assert_close, assert_same_losses, here
from test_tensor_parallel import NODES, settings

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError

pytestmark = [
    pytest.mark.timeout(900),
    # torch's tracer looks at the gradients of activations, and silences the warning in another way than pytest
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

LAST, MIDDLE = 2, 1
CLOSE = 1e-5
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""An architecture, how processes work together, and other settings."""
PAIRS: dict[str, Case] = {
    "pp": ("gpt2", {"pp_size": 2}, {}),
    "pp_full": ("llama", {"pp_size": 2}, {"activation_checkpointing": "full"}),
    "pp_rounds": ("llama", {"pp_size": 2, "pp_stages_per_process": 2}, {}),
    "tp": ("llama", {"tp_size": 2}, {}),
    "tp_full": ("llama", {"tp_size": 2}, {"activation_checkpointing": "full"}),
    "tp_positions": ("qwen3", {"tp_size": 2, "sequence_parallel": True}, {}),
    "tp_positions_full": (
        "gpt2", {"tp_size": 2, "sequence_parallel": True}, {"activation_checkpointing": "full"}
    ),
    "sp": ("gpt2", {"sp_size": 2}, {}),
    "cp": ("qwen3", {"cp_size": 2}, {"attention": "sdpa"}),
}  # fmt: skip
FOURS: dict[str, Case] = {
    "tp_fsdp_full": ("llama", {"tp_size": 2, "engine": "fsdp"}, {"activation_checkpointing": "full"}),
}


def made(store: Path, validation: Path, case: Case, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a case."""
    family, parallel, others = case
    raw = settings(store, validation, family, parallel=parallel, compile="blocks", **changes)
    layers = 2 * parallel.get("pp_stages_per_process", 1)
    return {**raw, **others, "architecture": {**raw["architecture"], "num_hidden_layers": layers}}


def run(
    cases: dict[str, Case], store: Path, validation: Path, base: Path, nodes: Sequence[int], **changes: Any
) -> None:
    """Runs each of `cases` compiled, uncompiled, and compiled from its first step on."""
    jobs: list[dict[str, Any]] = []
    for name, case in cases.items():
        raw = made(store, validation, case, **changes)
        begin = str(base / name / f"checkpoints/step-{MIDDLE:08d}")
        jobs.append({"out": str(base / name), "settings": raw})
        jobs.append({"out": str(base / f"{name}.uncompiled"), "settings": raw, "uncompiled": True})
        jobs.append({"out": str(base / f"{name}.resumed"), "settings": raw, "start_from": begin})
    toy.finish(worlds.start(partial(compiled_worker.work, jobs), nodes, base / "said"))


def assert_same_bits(one: Path, other: Path) -> None:
    for kind in ("model", "optimizer"):
        assert_close(state(one, kind), state(other, kind), 0.0)


def check(base: Path, cases: Iterable[str]) -> None:
    """Compiled runs have the bits of uncompiled ones and of resumed ones, and no graph has a break."""
    for name in cases:
        assert_same_bits(base / name, base / f"{name}.uncompiled")
        assert set(toy.losses(base / f"{name}.resumed")) == {LAST}
        assert_same_bits(base / name, base / f"{name}.resumed")
        found = [json.loads(file.read_text()) for file in (base / name).glob("graphs-*.json")]
        assert all(each["graphs"] > 0 and not each["breaks"] for each in found), found
        uncompiled = [json.loads(file.read_text()) for file in (base / f"{name}.uncompiled").glob("graphs-*.json")]
        assert all(each["graphs"] == 0 for each in uncompiled)


def check_against_one(base: Path, name: str, raw: dict[str, Any]) -> None:
    """The compiled run `name` trains what one process trains uncompiled, with its settings `raw`."""
    plain = base / f"{name}.plain"
    here(plain, {**raw, "parallel": {}, "compile": "off", "batch_size": {"-1": 7}})
    assert_close(state(plain, "model"), state(base / name, "model"), CLOSE)
    assert_same_losses(plain, base / name, 1e-6)


def state(out: Path, kind: str, step: int = LAST) -> dict[str, torch.Tensor]:
    return toy.saved(out / f"checkpoints/step-{step:08d}", kind)


@pytest.mark.slow
def test_two_processes_with_compiled_blocks(store: Path, validation_store: Path, tmp_path: Path) -> None:
    cases = {name: PAIRS[name] for name in ("tp",)}
    run(cases, store, validation_store, tmp_path, (2,), **UNVALIDATED)
    check(tmp_path, cases)
    # of a block in training, and in validation of two sizes: blocks share them
    assert json.loads((tmp_path / "tp" / "graphs-0.json").read_text())["graphs"] == 3
    for name, case in cases.items():
        check_against_one(tmp_path, name, made(store, validation_store, case, **UNVALIDATED))


@pytest.mark.nightly
def test_every_way_of_two_processes_to_share_a_replica(store: Path, validation_store: Path, tmp_path: Path) -> None:
    run(PAIRS, store, validation_store, tmp_path, (2,))
    check(tmp_path, PAIRS)
    for name, case in PAIRS.items():
        check_against_one(tmp_path, name, made(store, validation_store, case))


@pytest.mark.nightly
def test_kinds_of_parallelism_together(store: Path, validation_store: Path, tmp_path: Path) -> None:
    run(FOURS, store, validation_store, tmp_path, (2, 2), **NODES)
    check(tmp_path, FOURS)
    for name, case in FOURS.items():
        check_against_one(tmp_path, name, made(store, validation_store, case, **NODES))


# --------------------------------------------------------------------------------------------------- settings


def parse(family: str, compile: str = "blocks", **parallel: Any) -> Parameters:
    raw = settings(Path("none"), Path("none"), family, parallel=parallel, compile=compile)
    raw["architecture"].update({"attn_pdrop": 0.1, "resid_pdrop": 0.1} if family == "gpt2" else {})
    return Parameters.from_dict(raw, source="toy.json")


def test_dropout_of_divided_heads_is_refused() -> None:
    remedy = r"there is none with attn_pdrop 0\.0, and parallel\.sequence_parallel seeds it outside of graphs"
    with pytest.raises(UserError, match=rf'which no graph does \({remedy}\); use "off"'):
        parse("gpt2", tp_size=2)
    assert parse("gpt2", tp_size=2, sequence_parallel=True).compile == "blocks"
    assert parse("gpt2", sp_size=2).compile == "blocks"
    assert parse("llama", tp_size=2).compile == "blocks"


def test_context_parallelism_is_compiled_without_flash_attention() -> None:
    with pytest.raises(UserError, match=r'with "attention": "sdpa" alone; use "off"'):
        parse("llama", cp_size=2)


def test_the_zero_bubble_schedule_is_refused() -> None:
    with pytest.raises(UserError, match=r'"zero_bubble" splits the backward of each block in two'):
        parse("llama", pp_size=2, pp_schedule="zero_bubble")


@pytest.mark.parametrize("key", ["tp_size", "pp_size", "sp_size", "cp_size"])
def test_processes_that_share_a_replica_compile_blocks_alone(key: str) -> None:
    with pytest.raises(UserError, match=rf"with parallel\.{key} 2 only blocks are compiled"):
        parse("llama", "whole", **{key: 2})
