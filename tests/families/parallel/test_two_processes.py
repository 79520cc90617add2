"""Two processes that divide weights, products, blocks or positions train what one process trains, resume bit for bit,
read each other's checkpoints, and export the same models. Each case is a family and a way to divide it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_work
import pytest
import torch
import toy
from engine_runs import (
    CAUSAL,
    Case,
    Runs,
    adapted,
    assert_close,
    assert_exported_alike,
    assert_goes_on,
    assert_lion_alike,
    assert_overflows_alike,
    assert_resumed_alike,
    assert_same_bits,
    assert_same_losses,
    assert_trained_alike,
    averages,
    checkpoint,
    contents,
    last_step,
    state,
)
from frozen_weights import is_low
from safetensors import safe_open
from safetensors.torch import load_file
from selection import at_night

from terakoya.conversion.export import export
from terakoya.runs.checkpoints import find_problems, read_manifest
from terakoya.toolkit.formats import folder_digests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FSDP, TP, PP, SP, CP = {"engine": "fsdp"}, {"tp_size": 2}, {"pp_size": 2}, {"sp_size": 2}, {"cp_size": 2}
POSITIONS = {**TP, "sequence_parallel": True}
INTERLEAVED, BUBBLE = {**PP, "pp_stages_per_process": 2}, {**PP, "pp_schedule": "zero_bubble"}
DEEP = {"architecture": {"num_hidden_layers": 5}}
"""Stages of which no two have the same number of blocks."""
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
MUON = {"type": "muon", "learning_rate": 0.002, "adamw_learning_rate": 0.001, "eps": 1.0}
PARTS = {"objective": {**CAUSAL, "head_positions": 5, "z_loss": 0.1}}
EMA = {"events": {"ema": {"decay": 0.6, "from_step": 1}}, "max_steps": 3}
MUP = {"mup": {"base_width": 10}}
HALF = {"precision": "bf16", "autocast": True}

CASES: dict[str, Case] = {
    **{f"fsdp {name}": Case(name, FSDP) for name in ("odd", "electra", "gpt2", "llama")},
    **{f"tp {name}": Case(name, TP) for name in ("gpt2", "llama", "bert", "electra", "gptj", "qwen3", "roberta")},
    **{f"pp {name}": Case(name, PP, DEEP) for name in ("gpt2", "llama", "gptj", "qwen3")},
    "sp llama": Case("llama", SP),
    "cp qwen3": Case("qwen3", CP, own={"attention": "sdpa"}),
    "pp interleaved": Case("gpt2", INTERLEAVED, DEEP),
    "pp interleaved, one row": Case("gpt2", INTERLEAVED, {**DEEP, "micro_batch_size": 1}),
    "pp interleaved, few": Case("llama", INTERLEAVED, {**DEEP, "micro_batch_size": 7}),
    "pp bubble": Case("llama", BUBBLE, DEEP),
    "pp bubble, interleaved": Case("gpt2", {**BUBBLE, **INTERLEAVED}, DEEP),
    "pp bubble, few": Case("llama", BUBBLE, {**DEEP, "micro_batch_size": 7}),
    "pp few": Case("llama", PP, {**DEEP, "micro_batch_size": 7}),
}
ALWAYS = ("fsdp odd", "fsdp electra", "tp llama", "pp gpt2", "sp llama", "cp qwen3")
RESUMED = ("fsdp odd", "tp llama", "pp gpt2")
FEATURES: dict[str, Case] = {
    "fsdp frozen": Case("odd", FSDP, {"frozen_layers": 1}, started=True),
    "tp frozen": Case("llama", TP, {"frozen_layers": 1}, started=True),
    "pp frozen": Case("gpt2", PP, {**DEEP, "frozen_layers": 2}, FULL),
    "pp started": Case("llama", PP, started=True),
    "ddp lora": adapted("gpt2", {"engine": "ddp"}),
    "ddp frozen": Case("odd", {"engine": "ddp"}, {"frozen_layers": 1}, started=True),
    "fsdp lora": adapted("odd", FSDP),
    "tp lora": adapted("llama", TP),
    "tp lora, gpt2": adapted("gpt2", TP, **FULL),
    "tp lora, bert": adapted("bert", TP),
    "tp lora, positions": adapted("llama", POSITIONS),
    "pp lora": adapted("llama", PP, **FULL),
    "pp lora, bubble": adapted("gpt2", BUBBLE),
    "tp positions": Case("qwen3", POSITIONS),
    "tp head": Case("llama", TP, PARTS),
    "pp head": Case("gptj", PP, {**PARTS, "objective": {**PARTS["objective"], "layout": "stream"}}),
    "fsdp ema": Case("llama", FSDP, EMA),
    "tp ema": Case("llama", TP, EMA, {"checkpoint": {"save_steps": 1, "async_save": True}}),
    "pp ema": Case("llama", PP, EMA),
    "ddp ema": Case("llama", {"engine": "ddp"}, EMA),
    **{f"{name} mup": Case("gpt2", way, MUP) for name, way in (("ddp", {}), ("fsdp", FSDP), ("tp", TP), ("pp", PP))},
    "fsdp bf16": Case("odd", FSDP, {"precision": "bf16"}, exact=1e-2, close=1e-2),
    "tp bf16": Case("llama", TP, HALF, exact=1e-2, close=1e-2),
    "pp bf16": Case("llama", PP, HALF, SELECTIVE, exact=1e-2, close=1e-2),
    "fsdp muon": Case("bert", FSDP, {"optimizer": MUON}, exact=1e-2, close=1e-2),
    "pp muon": Case("gpt2", PP, {"optimizer": MUON}, exact=1e-2, close=1e-2),
    "sp muon": Case("llama", SP, {"optimizer": MUON}, exact=1e-2, close=1e-2),
    "pp adafactor": Case("qwen3", PP, {"optimizer": {"type": "adafactor", "learning_rate": 0.001}}),
    "tp stable_adamw": Case("bert", TP, {"optimizer": {"type": "stable_adamw", "learning_rate": 0.01}}),
}
"""Cases of what else a run may have."""
SOME = at_night(FEATURES, always=("fsdp frozen", "tp lora", "fsdp ema", "fsdp bf16"))
GO_ON: dict[str, tuple[Case, Case | None]] = {
    "fsdp from one": (CASES["fsdp odd"], None),
    "tp from one": (CASES["tp llama"], None),
    "pp from one": (CASES["pp gpt2"], None),
    "sp from one": (CASES["sp llama"], None),
    "tp from fsdp": (CASES["tp gpt2"], CASES["fsdp gpt2"]),
    "one from fsdp": (Case("odd", {}, nodes=(1,)), CASES["fsdp odd"]),
    "one from tp": (Case("llama", {}, nodes=(1,)), CASES["tp llama"]),
    "one from pp": (Case("gpt2", {}, DEEP, nodes=(1,)), CASES["pp gpt2"]),
    "one from sp": (Case("llama", {}, nodes=(1,)), CASES["sp llama"]),
    "lora, tp from pp": (FEATURES["tp lora, gpt2"], FEATURES["pp lora, bubble"]),
    "lora, pp from tp": (FEATURES["pp lora"], FEATURES["tp lora"]),
    "lora, one from tp": (Case("llama", {}, FEATURES["tp lora"].both, nodes=(1,), started=True), FEATURES["tp lora"]),
    "ema, tp from fsdp": (FEATURES["tp ema"], FEATURES["fsdp ema"]),
    "ema, pp from tp": (FEATURES["pp ema"], FEATURES["tp ema"]),
    "ema, fsdp from pp": (FEATURES["fsdp ema"], FEATURES["pp ema"]),
}
"""What goes on from a checkpoint of what."""
GOING_ON = at_night(GO_ON, always=("fsdp from one", "one from tp", "one from pp", "lora, one from tp"))


@pytest.mark.parametrize("name", at_night(CASES, always=ALWAYS))
def test_two_processes_train_what_one_trains(runs: Runs, name: str) -> None:
    assert_trained_alike(runs, CASES[name])


@pytest.mark.parametrize("name", at_night(CASES, always=RESUMED))
def test_resumed_is_bit_identical(runs: Runs, name: str) -> None:
    assert_resumed_alike(runs, CASES[name])


@pytest.mark.parametrize("name", SOME)
def test_features_train_and_resume_as_in_one_process(runs: Runs, name: str, tmp_path: Path) -> None:
    assert_trained_alike(runs, FEATURES[name])
    assert_resumed_alike(runs, FEATURES[name])
    if "lora" in name or "frozen" in name:
        assert_exported_alike(runs, FEATURES[name], tmp_path)


@pytest.mark.parametrize("name", GOING_ON)
def test_a_run_goes_on_under_another_layout(runs: Runs, name: str) -> None:
    assert_goes_on(runs, *GO_ON[name])


EXPORTED = [name for name in CASES if CASES[name].parallel in (FSDP, TP, PP)]


@pytest.mark.parametrize("name", at_night(EXPORTED, always=("fsdp electra", "tp llama", "pp gpt2")))
def test_the_export_is_that_of_one_process(runs: Runs, name: str, tmp_path: Path) -> None:
    assert_exported_alike(runs, CASES[name], tmp_path)


# ------------------------------------------------------------------------------------------- what engines differ in

VOCABULARY = ("word_embeddings", "wte", "embed_tokens", "lm_head.weight", "lm_head.bias", "predictions.bias")
"""Parts of the names of embeddings and vocabulary heads."""
ALIKE = [name for name in CASES if name.startswith("tp ")]


def assert_parts_alike(out: Path, values: int) -> None:
    """Weights that all processes of a replica have are the same on all, others in `values` parts, the same at one place
    of each replica; embeddings and heads are divided."""
    found = json.loads((out / "alike.json").read_text())
    whole, cut = ([each for each in found.values() if each["whole"] is kind] for kind in (True, False))
    vocabulary = [name for name in found if any(part in name for part in VOCABULARY)]
    assert vocabulary and not any(found[each]["whole"] for each in vocabulary)
    assert len(cut) >= 2 * 4 and {each["values"] for each in cut} == {values}
    assert {each["values"] for each in whole} == {1} and all(each["replicas"] for each in found.values())


@pytest.mark.parametrize("name", at_night(ALIKE, always=("tp llama",)))
def test_replicated_weights_stay_equal(runs: Runs, name: str) -> None:
    assert_parts_alike(runs.of(CASES[name], work=engine_work.alike), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", (None, "full", "selective"))
def test_replicated_weights_stay_equal_under_dropout(runs: Runs, kind: str | None) -> None:
    """In 16 micro-batches in which the processes of a replica have the same dropout outside of parallel regions."""
    drops = {"architecture": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.3}, "max_steps": 4}
    given = {**drops, "evaluation": None, "checkpoint": {"save_steps": 4}}
    straight = runs.of(CASES["tp gpt2"], work=engine_work.alike, **given)
    mine = runs.of(CASES["tp gpt2"], work=engine_work.alike, **given, activation_checkpointing=kind)
    assert_parts_alike(mine, 2)
    assert_same_bits(straight, mine)


@pytest.mark.parametrize(
    ("name", "kind"),
    at_night(
        [(name, kind) for name in ("fsdp odd", "tp llama", "pp gpt2") for kind in ("full", "selective")],
        always=[("fsdp odd", "full")],
    ),
)
def test_recomputation_and_saving_in_the_background_change_no_bit(runs: Runs, name: str, kind: str) -> None:
    saving: dict[str, Any] = {"full": {"model": "every"}, "selective": {"async_save": True}}[kind]
    mine = runs.of(CASES[name], activation_checkpointing=kind, evaluation=None, checkpoint={"save_steps": 1, **saving})
    assert_same_bits(runs.of(CASES[name]), mine)
    assert (checkpoint(mine, 1) / "model").is_dir() == (kind == "full")
    assert not (checkpoint(runs.of(CASES[name]), 1) / "model").exists(), "models are written at the end"


@pytest.mark.nightly
def test_resumed_with_dropout_that_is_computed_again_is_bit_identical(runs: Runs) -> None:
    dropouts = {"attention_dropout": 0.1}
    assert_resumed_alike(runs, Case("llama", PP, {"architecture": {**dropouts, **DEEP["architecture"]}}, FULL))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ("fsdp odd", "tp llama", "pp gpt2"))
def test_fp16_skips_the_same_steps(runs: Runs, name: str) -> None:
    assert_overflows_alike(runs, CASES[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ("fsdp odd", "tp llama"))
def test_lion_takes_the_same_steps(runs: Runs, name: str) -> None:
    assert_lion_alike(runs, CASES[name])


def test_bf16_is_over_fp32_weights(runs: Runs) -> None:
    mine, exact = runs.of(FEATURES["fsdp bf16"]), runs.of(CASES["fsdp odd"])
    assert read_manifest(checkpoint(mine, 1))["world"]["bf16_stream"]
    assert {value.dtype for value in state(mine, "model").values()} == {torch.float32}
    assert any(abs(toy.losses(mine)[step][0] - loss) > 1e-5 for step, (loss, _) in toy.losses(exact).items())


def test_in_the_stream_ddp_and_fsdp_go_on_from_each_other(runs: Runs) -> None:
    """Rows are in one micro-step, so gradients have the same bits; their norm is another sum."""
    both = {"precision": "bf16", "micro_batch_size": 9, "evaluation": None}
    ddp, fsdp = (Case("odd", {"engine": engine}, both) for engine in ("ddp", "fsdp"))
    for case, other in ((ddp, fsdp), (fsdp, ddp)):
        straight, before = runs.of(other), last_step(runs.of(other)) - 1
        mine = runs.of(case, checkpoint(straight, before))
        assert list(toy.losses(mine)) == [before + 1]
        assert_same_losses(straight, mine, 1e-6)
        assert_close(contents(straight), contents(mine), 1e-5)


@pytest.mark.parametrize("name", at_night(("fsdp odd", "tp llama"), always=("fsdp odd",)))
def test_a_step_that_is_not_finite_changes_nothing(runs: Runs, name: str) -> None:
    out = runs.of(CASES[name], checkpoint(runs.of(CASES[name]), 1), engine_work.poison)
    assert json.loads((out / "poison.json").read_text()) == [[[False, True], [False, True], [True, False]]] * 2


def test_frozen_weights_keep_the_bits_of_the_folder(runs: Runs) -> None:
    mine = runs.of(FEATURES["fsdp frozen"])
    before, after = load_file(runs.model("odd") / "model.safetensors"), state(mine, "model")
    for name, value in before.items():
        idle = name.endswith("key.bias")  # its gradient is 0: it does not change the softmax
        assert torch.equal(value, after[f"model.{name}"]) == is_low(name) or idle, name
    assert not any(is_low(name) for name in state(mine, "optimizer"))


@pytest.mark.nightly
def test_only_adapters_are_saved(runs: Runs) -> None:
    assert all(".lora_" in name for name in state(runs.of(FEATURES["pp lora, bubble"]), "model"))


@pytest.mark.parametrize(
    ("name", "stages"),
    at_night([("pp few", 2), ("pp bubble, few", 2), ("pp interleaved, few", 4)], always=[("pp interleaved, few", 4)]),
)
def test_idle_stages_print_a_warning(runs: Runs, name: str, stages: int) -> None:
    out = runs.of(CASES[name])
    assert runs.said[out].count(f"parallel.pp_size: {stages} stages share 1 micro-batch in a step") == 1


def test_each_process_keeps_and_writes_its_part_of_an_average(runs: Runs, tmp_path: Path) -> None:
    """Rank 0 alone under DDP, else each about half of the elements. They are exported as a model of no checkpoint."""
    out = runs.of(FEATURES["fsdp ema"])
    found = averages(out)
    whole = sum(value.numel() for value in found.values())
    sizes = []
    for path in (checkpoint(out, last_step(out)) / "events").iterdir():
        with safe_open(path, "pt") as file:
            sizes.append(sum(file.get_tensor(key).numel() for key in file.keys()))  # noqa: SIM118
    assert len(sizes) == 2 and sum(sizes) == whole and max(sizes) < 0.7 * whole
    assert len(list((checkpoint(runs.of(FEATURES["ddp ema"]), 3) / "events").iterdir())) == 1
    assert read_manifest(checkpoint(out, 3))["events"]["ema"] == {"updates": 2}
    assert find_problems(checkpoint(out, 3)) == []
    export(out, tmp_path / "model", weights="ema")
    values = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(values[key.removeprefix("model.")], value) for key, value in found.items())
    assert "checkpoint" not in json.loads((tmp_path / "model" / folder_digests.NAME).read_text(encoding="utf-8"))
