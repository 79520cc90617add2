"""Every family trains in every precision under what changes how its weights are held: the losses stay those of one
process that holds them all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toy
from dropouts import DROPOUTS
from selection import at_night

from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.training.setup import train_in_this_process
from terakoya_contract.toy import values

ENCODERS = ("bert", "roberta", "deberta", "deberta_v2", "modernbert")
DECODERS = ("gpt2", "gptj", "llama", "qwen3")
OBJECTIVES = {
    **dict.fromkeys(ENCODERS, "masked_lm"), **dict.fromkeys(DECODERS, "causal_lm"), "electra": "replaced_token",
}  # fmt: skip
CELLS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    f"{engine}, {kind}": (processes, {"parallel": parallel, "activation_checkpointing": kind})
    for (engine, processes, parallel), kind in product(
        (
            ("ddp", 1, {}),
            ("fsdp", 2, {"engine": "fsdp"}),
            ("zero3", 2, {"engine": "deepspeed", "zero_stage": 3}),
        ),
        (None, "full", "selective"),
    )
}
"""Processes and parameters of each."""
SAMPLE = (("deberta", "bf16", "fsdp, full"), ("deberta", "bf16", "zero3, None"))
REFUSED = ("ddp, None", "zero3, selective")
"""The comparison itself, and what is refused by name."""
ALL = [each for each in product(OBJECTIVES, ("bf16", "fp16"), CELLS) if each[2] not in REFUSED]


def settings(store: Path, family: str, precision: str) -> dict[str, Any]:
    component = registry().component("architectures", family)
    without_dropout = {name: 0.0 for name in DROPOUTS if name in component.model_fields}
    scaling = {"loss_scaling": {"init_scale": 1024.0}} if precision == "fp16" else {}
    return toy.parameters(
        store,
        architecture={"type": family, **values(component), **without_dropout},
        objective={"type": OBJECTIVES[family], **values(registry().component("objectives", OBJECTIVES[family]))},
        batch_size={"-1": 8},
        micro_batch_size=4,
        max_steps=3,
        precision=precision,
        autocast=True,
        checkpoint={"save_steps": 100, "model": "never"},
        **scaling,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision", "cell"), at_night(ALL, always=SAMPLE))
def test_it_trains_as_one_process_does(family: str, precision: str, cell: str, store: Path, tmp_path: Path) -> None:
    processes, further = CELLS[cell]
    alone = settings(store, family, precision)
    train_in_this_process(Parameters.from_dict(alone, source="test"), tmp_path / "alone")
    toy.train({**alone, **further}, tmp_path / "cell", nodes=(processes,))
    expected, got = toy.losses(tmp_path / "alone"), toy.losses(tmp_path / "cell")
    assert len(got) == 3
    for step, (loss, norm) in expected.items():
        assert got[step][0] == pytest.approx(loss, rel=1e-3), step
        assert got[step][1] == pytest.approx(norm, rel=2e-2), step
