"""Kinds of parallelism over compiled blocks have the bits of the same blocks uncompiled, and train what one process
trains uncompiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import compiled_worker
import pytest
import toy
from engine_runs import (
    FOUR,
    Case,
    Runs,
    assert_close,
    assert_same_bits,
    assert_same_losses,
    checkpoint,
    contents,
    settings,
)

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError

pytestmark = [
    pytest.mark.timeout(900),
    # torch's tracer looks at the gradients of activations, and silences the warning in another way than pytest
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

PAIRS: dict[str, Case] = {
    "pp": Case("gpt2", {"pp_size": 2}),
    "pp_full": Case("llama", {"pp_size": 2}, own={"activation_checkpointing": "full"}),
    "pp_rounds": Case("llama", {"pp_size": 2, "pp_stages_per_process": 2}, {"architecture": {"num_hidden_layers": 4}}),
    "tp": Case("llama", {"tp_size": 2}),
    "tp_full": Case("llama", {"tp_size": 2}, own={"activation_checkpointing": "full"}),
    "tp_positions": Case("qwen3", {"tp_size": 2, "sequence_parallel": True}),
    "tp_positions_full": Case(
        "gpt2", {"tp_size": 2, "sequence_parallel": True}, own={"activation_checkpointing": "full"}
    ),
    "sp": Case("gpt2", {"sp_size": 2}),
    "cp": Case("qwen3", {"cp_size": 2}, own={"attention": "sdpa"}),
    "tp_fsdp_full": Case(
        "llama", {"tp_size": 2, "engine": "fsdp"}, own={"activation_checkpointing": "full"}, nodes=FOUR
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAIRS)
def test_compiled_blocks_have_the_bits_of_uncompiled_ones(runs: Runs, name: str) -> None:
    """Also after a resume, and no graph has a break."""
    case = replace(PAIRS[name], own={**PAIRS[name].own, "compile": "blocks", "evaluation": None})
    mine, plain = runs.of(case, work=compiled_worker.compiled), runs.of(case, work=compiled_worker.uncompiled)
    assert_same_bits(mine, plain)
    resumed = runs.of(case, checkpoint(mine, 1), compiled_worker.compiled)
    assert set(toy.losses(resumed)) == {2}
    assert_same_bits(mine, resumed)
    found, without = ([json.loads(file.read_text()) for file in out.glob("graphs-*.json")] for out in (mine, plain))
    assert all(each["graphs"] > 0 and not each["breaks"] for each in found), found
    assert all(each["graphs"] == 0 for each in without)
    if name == "tp":  # of a block in training, and in validation of two sizes: blocks share them
        assert found[0]["graphs"] == 3
    one = runs.one(case)
    assert_close(contents(one), contents(mine), 1e-5)
    assert_same_losses(one, mine, 5e-6)


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
