"""DeepSpeed's stages train what one process trains, resume bit for bit, and any engine reads their checkpoints: with
every family of settings that changes what a stage holds, and where it holds it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_work
import pytest
import torch
from engine_runs import (
    STAGES,
    Case,
    Runs,
    adapted,
    assert_exported_alike,
    assert_goes_on,
    assert_lion_alike,
    assert_overflows_alike,
    assert_resumed_alike,
    assert_same_bits,
    assert_trained_alike,
    checkpoint,
    needs_deepspeed,
    settings,
    state,
)
from frozen_weights import is_low
from safetensors.torch import load_file
from selection import at_night
from torch import Tensor, nn

from terakoya.errors import UserError
from terakoya_parallel.deepspeed import DeepSpeedEngine, Fragment
from terakoya_parallel.whole_tensors import WholeTensors

pytestmark = [needs_deepspeed, pytest.mark.timeout(600)]

ELECTRA = {"type": "replaced_token", "mlm_probability": 0.2, "generator_size": "1/2", "sharing": "disentangled"}
UNCORRECTED = {"type": "adamw", "learning_rate": 0.01, "bias_correction": False}
MUON = {"type": "muon", "learning_rate": 0.01, "eps": 1.0}
EMA = {"events": {"ema": {"decay": 0.6, "from_step": 1}}, "max_steps": 3}
CONFIG = {
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50, "overlap_comm": True},
}
OFFLOAD = {"offload_optimizer_device": "cpu"}


def zero(stage: int, **further: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage, **further}


CASES: dict[str, Case] = {
    **{f"zero {stage}": Case("odd", zero(stage)) for stage in STAGES},
    "optimizer 1": Case("odd", zero(1, **OFFLOAD)),
    "optimizer 2": Case("odd", zero(2, **OFFLOAD)),
    "both 3": Case("odd", zero(3, **OFFLOAD, offload_param_device="cpu")),
    "buckets 2": Case("odd", zero(2, deepspeed_config=CONFIG)),
    **{f"electra {stage}": Case("electra", zero(stage)) for stage in (2, 3)},
    **{f"disentangled {stage}": Case("electra", zero(stage), {"objective": ELECTRA}) for stage in (2, 3)},
    **{f"frozen {stage}": Case("odd", zero(stage), {"frozen_layers": 1}, started=True) for stage in STAGES},
    **{f"lora {stage}": adapted("odd", zero(stage)) for stage in (2, 3)},
    "bf16 0": Case("odd", zero(0), {"precision": "bf16", "autocast": True}, exact=1e-2, close=1e-2),
    "bf16 3": Case("odd", zero(3), {"precision": "bf16", "autocast": True}, exact=1e-2, close=1e-2),
    **{f"uncorrected {stage}": Case("odd", zero(stage), {"optimizer": UNCORRECTED}) for stage in (1, 3)},
    **{f"ema {stage}": Case("llama", zero(stage), EMA) for stage in STAGES},
    **{f"mup {stage}": Case("gpt2", zero(stage), {"mup": {"base_width": 10}}) for stage in STAGES},
}
ALWAYS = ("zero 2", "zero 3", "disentangled 3", "frozen 3")
GO_ON: dict[str, tuple[Case, Case | None]] = {
    **{f"{stage} from one": (CASES[f"zero {stage}"], None) for stage in STAGES},
    **{f"one from {stage}": (Case("odd", {}, nodes=(1,)), CASES[f"zero {stage}"]) for stage in STAGES},
    "alone 3": (Case("odd", zero(3), nodes=(1,)), None),
    "zero from fsdp": (CASES["zero 2"], Case("odd", {"engine": "fsdp"})),
    "fsdp from zero": (Case("odd", {"engine": "fsdp"}), CASES["zero 2"]),
    **{
        f"ema, {(stage + 1) % 4} from {stage}": (CASES[f"ema {(stage + 1) % 4}"], CASES[f"ema {stage}"])
        for stage in STAGES
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(CASES, always=ALWAYS))
def test_a_stage_trains_what_one_process_trains(runs: Runs, name: str) -> None:
    assert_trained_alike(runs, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(CASES, always=("zero 2", "zero 3")))
def test_resumed_in_the_same_world_is_bit_identical(runs: Runs, name: str) -> None:
    assert_resumed_alike(runs, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(GO_ON, always=("3 from one", "one from 2")))
def test_checkpoints_move_between_engines(runs: Runs, name: str) -> None:
    assert_goes_on(runs, *GO_ON[name])


EXPORTED = [name for name in CASES if name.startswith(("electra", "disentangled", "lora"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(EXPORTED, always=("disentangled 3",)))
def test_exports_are_those_of_one_process(runs: Runs, name: str, tmp_path: Path) -> None:
    assert_exported_alike(runs, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night(STAGES, always=(2,)))
def test_fp16_scales_losses_as_without_deepspeed(runs: Runs, stage: int) -> None:
    mine = assert_overflows_alike(runs, CASES[f"zero {stage}"])
    assert json.loads((checkpoint(mine, 3) / "manifest.json").read_text())["loss_scaling"]["scale"] == 2.0**16
    lines = [line for line in runs.said[mine].splitlines() if "[WARNING]" in line or "[INFO]" in line]
    assert bool(lines) == (stage > 0), "stage 0 has DeepSpeed's other optimizer, which says nothing"
    assert all("OVERFLOW! Skipping step" in line for line in lines), "DeepSpeed prints nothing else"


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "kind"), [(2, "selective"), (3, "full")])
def test_activation_checkpointing_changes_no_bit(runs: Runs, stage: int, kind: str) -> None:
    case = CASES[f"zero {stage}"]
    assert_same_bits(runs.of(case), runs.of(case, activation_checkpointing=kind, evaluation=None))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_lion_takes_the_same_steps_when_sharded(runs: Runs, stage: int) -> None:
    assert_lion_alike(runs, CASES[f"zero {stage}"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night(STAGES, always=(3,)))
def test_a_step_that_is_not_finite_changes_nothing(runs: Runs, stage: int) -> None:
    case = CASES[f"zero {stage}"]
    out = runs.of(case, checkpoint(runs.of(case), 1), engine_work.poison)
    assert json.loads((out / "poison.json").read_text()) == [[[False, True], [False, True], [True, False]]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sections"),
    at_night([("optimizer 2", 1), ("both 3", 2), ("buckets 2", 0)], always=[("buckets 2", 0)]),
)
def test_deepspeed_received_the_settings(runs: Runs, name: str, sections: int) -> None:
    told = json.loads((runs.of(CASES[name]) / "zero.json").read_text())
    offloads = [told[key] for key in ("offload_optimizer", "offload_param")]
    assert [each["device"] for each in offloads if each] == ["cpu"] * sections
    assert ((told["reduce_bucket_size"], told["overlap_comm"]) == (50, True)) == (name == "buckets 2")


@pytest.mark.slow
def test_frozen_weights_keep_their_bits_and_the_step_count_without_bias_correction_stays(runs: Runs) -> None:
    after = state(runs.of(CASES["frozen 3"]), "model")
    for name, value in load_file(runs.model("odd") / "model.safetensors").items():
        same = value.numpy().tobytes() == after[f"model.{name}"].numpy().tobytes()
        idle = name.endswith("key.bias")  # its gradient is 0: it does not change the softmax
        assert same == is_low(name) or idle, name
    assert not any(is_low(name) for name in state(runs.of(CASES["frozen 3"]), "optimizer"))
    adapters = state(runs.of(CASES["lora 3"]), "model")
    assert {name.rpartition("/")[0] for name in state(runs.of(CASES["lora 3"]), "optimizer")} == adapters.keys()
    assert all(".lora_" in name for name in adapters)
    kept = state(runs.of(CASES["uncorrected 3"]), "optimizer")
    assert {float(value) for name, value in kept.items() if name.endswith("/step")} == {1e8}


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night((3, 1), always=(3,)))
def test_saving_gathers_no_weights_and_files_hold_the_ranges_of_their_process(runs: Runs, stage: int) -> None:
    """Of sharded weights no process writes, or sees, more than its half; saves are in the background."""
    saving = {"checkpoint": {"save_steps": 1, "async_save": True}, "evaluation": None}
    out = runs.of(CASES[f"zero {stage}"], work=engine_work.watch, **saving)
    whole = {name: value.numel() for name, value in state(out, "model").items()}
    watched = json.loads((out / "watched.json").read_text())
    assert [each["gathered"] for each in watched] == [0, 0]
    written, largest = [sum(each["sizes"].values()) for each in watched], max(whole, key=lambda name: whole[name])
    assert sum(written) == sum(whole.values()) and max(written) < 0.51 * sum(whole.values())
    if stage == 3:  # which splits every weight in two, stage 1 the concatenation of all
        assert all(each["sizes"][largest] <= -(-whole[largest] // 2) for each in watched)
    assert_same_bits(runs.of(CASES[f"zero {stage}"]), out)
    sizes = [path.stat().st_size for path in (checkpoint(out, 2) / "state").glob("optimizer-*")]
    tensors = state(out, "optimizer")
    elements = sum(value.numel() for value in tensors.values())
    assert len(sizes) == 2 and abs(sizes[0] - sizes[1]) < 0.1 * sizes[0]
    assert 4 * elements < sum(sizes) < 4 * elements + 200 * len(tensors) * 2


@pytest.mark.nightly
def test_a_process_that_is_not_forked_prints_nothing_of_deepspeeds(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(settings(runs.store, runs.validation, "odd", parallel=zero(3))))
    command = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert not any(word in said for word in ("[WARNING]", "[INFO]", "Warning:")), said


def test_missing_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from terakoya_parallel.deepspeed_setup import import_deepspeed, launcher_variables

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    before = dict(os.environ)
    with launcher_variables(0, 1, 0), pytest.raises(UserError, match=r"pip install .terakoya\[deepspeed\]"):
        import_deepspeed()
    assert dict(os.environ) == before


class Saved(dict[str, Tensor]):
    """The tensors of a checkpoint."""

    __call__ = dict.__getitem__

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def part(self, name: str, start: int, size: int) -> Tensor:
        return self[name][start : start + size]


def test_weights_that_were_frozen_do_not_get_the_step_count_of_others() -> None:
    """Their moments of 0 would be those of many steps. A count that stays, without bias correction, is no such one."""
    flat, saved = nn.Parameter(torch.zeros(4)), Saved({"high/exp_avg": torch.ones(2), "high/step": torch.tensor(7.0)})
    engine: Any = object.__new__(DeepSpeedEngine)
    engine.optimizer, engine.fused = torch.optim.AdamW([flat]), False
    engine.whole = WholeTensors(engine.optimizer, {}, None, device=flat.device)
    engine.trainable = {name: nn.Parameter(torch.zeros(2)) for name in ("low", "high")}
    engine.fragments = {"low": Fragment(flat, 0, 0, 2), "high": Fragment(flat, 2, 0, 2)}
    with pytest.raises(UserError, match=r'low: its optimizer state step is 0 but others have 7; .* engine "ddp"'):
        engine.load_optimizer_state(saved, frozenset(saved))
    saved["high/step"] = torch.tensor(1e8)
    engine.load_optimizer_state(saved, frozenset(saved))
    assert engine.optimizer.state[flat]["exp_avg"].tolist() == [0.0, 0.0, 1.0, 1.0]
