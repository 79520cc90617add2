"""`fully_shard` trains what one process trains, and any engine reads its checkpoints.

Two processes have 5 and 2 rows of each step, three have 4, 2 and 1, in micro-steps of 2, so that those with fewer run
empty ones. Sizes are odd, so that none is divisible by the number of processes.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_worker
import pytest
import torch
import toy
import worlds
from engine_runs import (
    HALF,
    LAST,
    LION,
    MIDDLE,
    UNVALIDATED,
    assert_close,
    assert_same_losses,
    checkpoint,
    here,
    settings,
    state,
)
from frozen_weights import is_low
from safetensors.torch import load_file
from selection import at_night, wanted
from start_folders import spread
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

from terakoya.conversion.export import export

FSDP = {"parallel": {"engine": "fsdp"}}
ONE, TWO, THREE = {"-1": 7}, {"0": 5, "1": 2}, {"0": 4, "1": 2, "2": 1}
ELECTRA = {
    "type": "electra", "embedding_size": 11, "hidden_size": 30, "num_attention_heads": 6, "intermediate_size": 66,
}  # fmt: skip
GPT2 = {
    "type": "gpt2", "hidden_size": 15, "num_hidden_layers": 1, "num_attention_heads": 3, "max_position_embeddings": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA = {
    "type": "llama", "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1,
    "intermediate_size": 33, "max_position_embeddings": 32,
}  # fmt: skip
CAUSAL = {"type": "causal_lm", "append_eos": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "electra": {"architecture": ELECTRA, "objective": {"type": "replaced_token", "generator_size": "1/2"}},
    "gpt2": {"architecture": GPT2, "objective": CAUSAL},
    "llama": {"architecture": LLAMA, "objective": CAUSAL},
}
EXPORTS = {
    "bert": {"": AutoModelForMaskedLM},
    "electra": {"generator": ElectraForMaskedLM, "discriminator": ElectraForPreTraining},
    "gpt2": {"": AutoModelForCausalLM},
    "llama": {"": AutoModelForCausalLM},
}
"""Transformers' own class for each model of an export."""
ALWAYS = ("bert", "electra", "llama")
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def family(name: str, store: Path, validation: Path, rows: dict[str, int], **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a run of `name`: as in the tests of DeepSpeed, with another engine."""
    raw = settings(store, validation, None, rows, **changes)
    own = FAMILIES[name]
    if "architecture" in own:
        kept = raw["architecture"] if name == "electra" else {}
        raw |= {"architecture": {**kept, **own["architecture"]}, "objective": own["objective"]}
    return raw


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of all runs: `bert`, `bert_plain`, `bert_resumed`, ..., and of the model `start`."""
    base = tmp_path_factory.mktemp("fsdp")
    jobs: dict[int, list[dict[str, Any]]] = {2: [], 3: []}

    def job(name: str, of: str = "bert", processes: int = 2, **changes: Any) -> None:
        extra = {key: changes.pop(key) for key in ("start_from_checkpoint", "poison") if key in changes}
        if "start_from_checkpoint" in extra:
            extra["start_from"] = str(checkpoint(base / extra.pop("start_from_checkpoint"), MIDDLE))
        raw = family(of, store, validation_store, TWO if processes == 2 else THREE, **FSDP, **changes)
        jobs[processes].append({"out": str(base / name), "settings": raw, **extra})

    def plain(name: str, of: str = "bert", **changes: Any) -> None:
        here(base / name, family(of, store, validation_store, ONE, **changes))

    two_layers = {**settings(store, validation_store, None, ONE)["architecture"], "num_hidden_layers": 2}
    shape = {key: value for key, value in two_layers.items() if key != "type"}
    spread(BertForMaskedLM(BertConfig(**shape, vocab_size=200, pad_token_id=0)), 1).save_pretrained(base / "start")
    begun = {"start_from": str(base / "start"), "architecture": two_layers}
    variants: dict[str, dict[str, Any]] = {
        "bf16": {"precision": "bf16", "autocast": True, "evaluation": None, "max_steps": MIDDLE},
        "fp16": HALF,
        "lion": LION,
        "frozen": {**begun, "frozen_layers": 1},
        "lora": {**begun, **UNVALIDATED, "lora": {"r": 2, "target_modules": "all-linear"}},
    }
    if importlib.util.find_spec("peft") is None:
        del variants["lora"]
    for name in {"bert": None, **dict.fromkeys(wanted(request, "name"))}.keys() & FAMILIES.keys():
        plain(f"{name}_plain", name)
        job(name, name)
        job(f"{name}_resumed", name, start_from_checkpoint=name)
    for name, changes in variants.items():
        plain(f"{name}_plain", **changes)
        job(name, **changes)
    job("poison", start_from_checkpoint="bert", poison=True)
    job("from_plain", start_from_checkpoint="bert_plain", **UNVALIDATED)
    job("frozen_resumed", start_from_checkpoint="frozen", **variants["frozen"])
    computed_again: dict[str, Any] = {"full": {"model": "every"}, "selective": {"async_save": True}}
    for kind, saving in computed_again.items():
        job(kind, activation_checkpointing=kind, evaluation=None, checkpoint={"save_steps": MIDDLE, **saving})
    job("three", processes=3)
    job("three_resumed", processes=3, start_from_checkpoint="three")
    job("two_to_three", processes=3, start_from_checkpoint="bert", **UNVALIDATED)
    for processes, each in jobs.items():
        toy.finish(worlds.start(partial(fsdp_worker.run, each), (1,) * processes, base / "said"))
    one = family("bert", store, validation_store, ONE, **UNVALIDATED)
    here(base / "to_plain", one, checkpoint(base / "bert", MIDDLE))
    here(base / "to_one", {**one, **FSDP}, checkpoint(base / "three", MIDDLE))
    return base


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(FAMILIES, always=ALWAYS))
def test_two_processes_train_what_one_trains(runs: Path, name: str) -> None:
    plain, mine = runs / f"{name}_plain", runs / name
    if name != "electra":  # rounding may change its samples
        assert_same_losses(plain, mine, 1e-6)
    assert_close(state(plain, "model", MIDDLE), state(mine, "model", MIDDLE), 1e-6)
    assert_close(state(plain, "model"), state(mine, "model"), 1e-6)
    # moments are averages of gradients; the largest of them say how exact gradients are
    assert_close(state(plain, "optimizer"), state(mine, "optimizer"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(FAMILIES, always=ALWAYS))
def test_validation_is_the_same(runs: Path, name: str) -> None:
    plain, mine = (toy.records(runs / each, "validation") for each in (f"{name}_plain", name))
    assert plain.keys() == mine.keys() == {0, MIDDLE, LAST}
    for step in plain:
        assert mine[step]["loss"] == pytest.approx(plain[step]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night([*FAMILIES, "frozen", "three"], always=[*ALWAYS, "frozen", "three"]))
def test_resumed_in_the_same_world_is_bit_identical(runs: Path, name: str) -> None:
    straight, resumed = runs / name, runs / f"{name}_resumed"
    assert set(toy.losses(resumed)) == set(range(MIDDLE + 1, LAST + 1))
    assert_same_losses(straight, resumed, 0.0)
    for kind in ("model", "optimizer"):
        assert_close(state(straight, kind), state(resumed, kind), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three", "from_plain", "to_plain", "two_to_three", "to_one"])
def test_another_world_or_engine_resumes_with_the_same_losses(runs: Path, name: str) -> None:
    first = 1 if name == "three" else MIDDLE + 1
    assert set(toy.losses(runs / name)) == set(range(first, LAST + 1))
    assert_same_losses(runs / "bert_plain", runs / name, 1e-5)
    assert_close(state(runs / "bert_plain", "model"), state(runs / name, "model"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(FAMILIES, always=ALWAYS))
def test_the_export_has_the_trained_weights(runs: Path, name: str, tmp_path: Path) -> None:
    export(runs / name, tmp_path / "model")
    trained = state(runs / name, "model")
    for folder, kind in EXPORTS[name].items():
        loaded = kind.from_pretrained(tmp_path / "model" / folder)
        prefix = f"{folder or 'model'}."
        own = {key.removeprefix(prefix): value for key, value in trained.items() if key.startswith(prefix)}
        values = loaded.state_dict()
        assert own.keys() <= values.keys() and len(own) > 10
        for key, value in own.items():
            assert torch.equal(values[key], value), key
        last = load_file(checkpoint(runs / name, LAST) / "model" / folder / "model.safetensors")
        for key, value in last.items():
            assert torch.equal(values[key], value), key


@pytest.mark.slow
def test_models_are_written_at_the_configured_interval(runs: Path) -> None:
    for name, steps in (("bert", [LAST]), ("full", [MIDDLE, LAST])):
        assert [step for step in (MIDDLE, LAST) if (checkpoint(runs / name, step) / "model").is_dir()] == steps
    for step in (MIDDLE, LAST):
        written = load_file(checkpoint(runs / "full", step) / "model/model.safetensors")
        trained = state(runs / "full", "model", step)
        assert_close(written, {key: trained[f"model.{key}"] for key in written}, 0.0)


@pytest.mark.slow
def test_bf16_is_autocast_over_fp32_weights(runs: Path) -> None:
    mine, fp32 = toy.losses(runs / "bf16"), toy.losses(runs / "bert")
    for step, values in mine.items():
        assert values == pytest.approx(toy.losses(runs / "bf16_plain")[step], rel=1e-2)
    assert any(abs(mine[step][0] - fp32[step][0]) > 1e-5 for step in mine), "the run computed in fp32"
    weights = state(runs / "bf16", "model", MIDDLE)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert_close(state(runs / "bf16_plain", "model", MIDDLE), weights, 1e-2)


@pytest.mark.slow
def test_fp16_scales_losses_as_under_ddp(runs: Path) -> None:
    """The first step overflows and both processes skip it; later steps fit into the lower scale."""
    plain, mine = (toy.records(runs / name) for name in ("fp16_plain", "fp16"))
    for records in (plain, mine):
        assert [(each["loss_scale"], each["skipped_steps"]) for each in records.values()] == [(2.0**16, 1)] * LAST
        assert records[1]["grad_norm"] is None
    for step in range(2, LAST + 1):
        for name in ("loss", "grad_norm"):
            assert mine[step][name] == pytest.approx(plain[step][name], rel=1e-2)
    assert_close(state(runs / "fp16_plain", "model"), state(runs / "fp16", "model"), 1e-2)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing(runs: Path) -> None:
    bad = {"finite": False, "stayed": True}
    found = json.loads((runs / "poison/poison.json").read_text())
    assert found == [bad, bad, {"finite": True, "stayed": False}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_and_saving_in_the_background_change_no_bit(runs: Path, kind: str) -> None:
    assert_same_losses(runs / "bert", runs / kind, 0.0)
    for part in ("model", "optimizer"):
        for step in (MIDDLE, LAST):
            assert_close(state(runs / "bert", part, step), state(runs / kind, part, step), 0.0)


@pytest.mark.slow
def test_lion_takes_the_same_steps_when_sharded(runs: Path) -> None:
    """Lion's updates are signs: where a gradient is nearly zero, rounding may flip one."""
    assert_same_losses(runs / "lion_plain", runs / "lion", 1e-4)
    plain, mine = state(runs / "lion_plain", "model"), state(runs / "lion", "model")
    learnt = [name for name in plain if not name.endswith("key.bias")]  # whose gradient is 0, so its sign is rounding
    apart = sum(int(((plain[name] - mine[name]).abs() > 1e-6).sum()) for name in learnt)
    assert apart <= sum(plain[name].numel() for name in learnt) / 1000
    assert state(runs / "lion", "optimizer").keys() == state(runs / "lion_plain", "optimizer").keys()


@pytest.mark.slow
def test_frozen_weights_stay_and_the_rest_is_trained_as_by_one_process(runs: Path) -> None:
    plain, mine = runs / "frozen_plain", runs / "frozen"
    assert_same_losses(plain, mine, 1e-5)
    assert_close(state(plain, "model"), state(mine, "model"), 1e-5)
    before, after = load_file(runs / "start/model.safetensors"), state(mine, "model")
    for name, value in before.items():
        idle = name.endswith("key.bias")  # its gradient is 0: it does not change the softmax
        assert torch.equal(value, after[f"model.{name}"]) == is_low(name) or idle, name
    assert not any(is_low(name) for name in state(mine, "optimizer"))


@pytest.mark.slow
@needs_peft
def test_adapters_are_trained_as_by_one_process_and_only_they_are_saved(runs: Path, tmp_path: Path) -> None:
    plain, mine = runs / "lora_plain", runs / "lora"
    assert_same_losses(plain, mine, 1e-5)
    adapters = state(mine, "model")
    assert adapters and all(".lora_" in name for name in adapters)
    assert_close(state(plain, "model"), adapters, 1e-5)
    export(mine, tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert_close(load_file(checkpoint(plain, LAST) / "model/model.safetensors"), merged, 1e-5)
    assert (checkpoint(mine, LAST) / "adapter/adapter_config.json").is_file()
