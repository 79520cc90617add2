"""Adapters where processes divide layers or blocks are trained, saved and exported as by one process.

A world of two processes runs every job but those of `FOUR`, which four processes run on two nodes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensor_worker
import torch
import toy
import worlds
from engine_runs import assert_close, assert_same_losses, here
from safetensors.torch import load_file
from start_folders import spread
from test_tensor_parallel import ARCHITECTURES, NODES, settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from terakoya.conversion.export import export

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # from PeftModel
]

LAST, MIDDLE = 2, 1
CLOSE = 1e-5
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"r": 3, "target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"]},
    "gpt2": {"r": 2, "target_modules": ["c_attn", "c_proj", "c_fc"], "use_rslora": True},
    "bert": {"r": 2, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
}
"""The adapters of each family: in gpt2 over matrices side by side, in bert also over layers that are not divided."""
TENSOR, PIPELINE = {"tp_size": 2}, {"pp_size": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp_llama": ("llama", TENSOR, {}),
    "tp_gpt2": ("gpt2", TENSOR, {"activation_checkpointing": "full"}),
    "tp_bert": ("bert", TENSOR, {}),
    "pp_llama": ("llama", PIPELINE, {"activation_checkpointing": "full"}),
    "pp_gpt2": ("gpt2", {**PIPELINE, "pp_schedule": "zero_bubble"}, {}),
    "sequence_llama": ("llama", {**TENSOR, "sequence_parallel": True}, {}),
    "tp_fsdp": ("gpt2", {**TENSOR, "engine": "fsdp"}, NODES),
    "tp_pp": ("llama", {**TENSOR, **PIPELINE}, NODES),
}
"""A family, how processes work together, and other settings."""
FOUR = [case for case, (_, _, others) in CASES.items() if others is NODES]
PAIRS = [case for case in CASES if case not in FOUR]
FROM = {"tp_llama": "plain_llama", "tp_gpt2": "pp_gpt2", "pp_llama": "tp_llama", "pp_gpt2": "plain_gpt2"}
"""Runs that go on from a checkpoint of another layout, by the case that goes on."""
TO_ONE = ("tp_gpt2", "pp_llama")
AUTO = {"llama": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}


@pytest.fixture(scope="module")
def runs(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of one and two processes, and of the models `start_FAMILY` below adapters."""
    base = tmp_path_factory.mktemp("adapters")
    make = partial(job, base, store, validation_store)
    for family in ADAPTERS:
        save_model(family, base / f"start_{family}")
        here(base / f"plain_{family}", adapted(base, store, validation_store, family))
    jobs = [each for case in PAIRS for each in (make(case, case), make(f"{case}.resumed", case, case))]
    jobs += [make(f"{case}.from_another", case, source) for case, source in FROM.items()]
    toy.finish(worlds.start(partial(tensor_worker.work, jobs), (2,), base / "said"))
    for case in TO_ONE:
        source = base / case / f"checkpoints/step-{MIDDLE:08d}"
        here(base / f"{case}.to_one", adapted(base, store, validation_store, CASES[case][0]), source)
    return base


@pytest.fixture(scope="module")
def four(runs: Path, store: Path, validation_store: Path) -> Path:
    """The folder of `runs`, with those of four processes."""
    make = partial(job, runs, store, validation_store)
    jobs = [each for case in FOUR for each in (make(case, case), make(f"{case}.resumed", case, case))]
    toy.finish(worlds.start(partial(tensor_worker.work, jobs), (2, 2), runs / "said"))
    return runs


def adapted(base: Path, store: Path, validation: Path, family: str, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of one process with adapters over a model of `family`."""
    started = {"start_from": str(base / f"start_{family}"), "lora": ADAPTERS[family]}
    return settings(store, validation, family, **started, **changes)


def job(base: Path, store: Path, validation: Path, out: str, case: str, source: str | None = None) -> dict[str, Any]:
    """A job of `worlds`, which may go on from a checkpoint of the run `source`."""
    family, parallel, others = CASES[case]
    raw = adapted(base, store, validation, family, parallel=parallel, **others)
    begin = source and str(base / source / f"checkpoints/step-{MIDDLE:08d}")
    return {"out": str(base / out), "settings": raw, "start_from": begin}


def save_model(family: str, folder: Path) -> None:
    """Saves a model of `family` in plain Transformers."""
    ids = {"vocab_size": 200, "bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
    sizes = {key: value for key, value in ARCHITECTURES[family].items() if key != "type"}
    config = AutoConfig.for_model(family, **sizes, **ids, tie_word_embeddings=family != "llama")
    torch.manual_seed(5)
    spread(AUTO[family].from_config(config), 1).save_pretrained(folder)


def state(out: Path, kind: str, step: int = LAST) -> dict[str, torch.Tensor]:
    return toy.saved(out / f"checkpoints/step-{step:08d}", kind)


def moments(out: Path, step: int = LAST) -> dict[str, torch.Tensor]:
    """Of the last step the gradients, those of the first matrices too: the second ones are zero before the first."""
    return {name: value for name, value in state(out, "optimizer", step).items() if name.endswith("/exp_avg")}


@pytest.mark.parametrize("case", PAIRS)
def test_gradients_and_adapters_are_those_of_one_process(runs: Path, case: str) -> None:
    plain, mine = runs / f"plain_{CASES[case][0]}", runs / case
    found = moments(mine)
    assert any(".lora_A." in name for name in found) and all(value.any() for value in found.values())
    for step in (MIDDLE, LAST):
        assert_close(moments(plain, step), moments(mine, step), CLOSE)
        assert toy.records(mine)[step]["grad_norm"] == pytest.approx(toy.records(plain)[step]["grad_norm"], rel=CLOSE)
    assert_close(state(plain, "model"), state(mine, "model"), CLOSE)
    assert_same_losses(plain, mine, 1e-6)
    for step, record in toy.records(plain, "validation").items():
        assert toy.records(mine, "validation")[step]["loss"] == pytest.approx(record["loss"], rel=1e-6)


@pytest.mark.parametrize("case", PAIRS)
def test_resumed_is_bit_identical(runs: Path, case: str) -> None:
    straight, resumed = runs / case, runs / f"{case}.resumed"
    assert set(toy.losses(resumed)) == {LAST}
    assert_same_losses(straight, resumed, 0.0)
    for kind in ("model", "optimizer"):
        assert_close(state(straight, kind), state(resumed, kind), 0.0)


@pytest.mark.parametrize("run", [*(f"{case}.from_another" for case in FROM), *(f"{case}.to_one" for case in TO_ONE)])
def test_a_run_goes_on_under_another_layout(runs: Path, run: str) -> None:
    plain, mine = runs / f"plain_{CASES[run.partition('.')[0]][0]}", runs / run
    assert set(toy.losses(mine)) == {LAST}
    for kind in ("model", "optimizer"):
        assert_close(state(plain, kind), state(mine, kind), CLOSE)


@pytest.mark.parametrize("case", PAIRS)
def test_adapters_and_the_merged_model_are_those_of_one_process(runs: Path, case: str, tmp_path: Path) -> None:
    family = CASES[case][0]
    out = export(runs / case, tmp_path / "out").out
    plain, mine = (runs / f"{run}/checkpoints/step-{LAST:08d}" for run in (f"plain_{family}", case))
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        for each in (mine / file, out / file.removeprefix("model/")):
            assert_close(load_file(plain / file), load_file(each), CLOSE)
    merged = AUTO[family].from_pretrained(out, local_files_only=True).eval()
    base = AUTO[family].from_pretrained(runs / f"start_{family}", local_files_only=True)
    adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    ids = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("case", FOUR)
def test_four_processes_train_save_and_export_alike(four: Path, case: str, tmp_path: Path) -> None:
    test_gradients_and_adapters_are_those_of_one_process(four, case)
    test_resumed_is_bit_identical(four, case)
    test_adapters_and_the_merged_model_are_those_of_one_process(four, case, tmp_path)
