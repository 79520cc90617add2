"""Training steps on a CUDA device without data: every device is the right one, no step waits for the device, and none
costs more kernels or bytes than the table beside this file says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_cuda
import fake_cuda_cases
import pytest

ALLOWED = frozenset({"where", "masked_fill", "index of ids", "a copy without waiting", "known repeats"})
"""The ways of `fake_cuda_worker.probe` that do not wait."""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.compile_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda_cases.make_stores(tmp_path_factory.mktemp("rows") / "store")


def waits(seen: Mapping[str, Any]) -> dict[str, list[str]]:
    """The waits of each step and update that has any."""
    found = {name: each["waits"] for name, each in seen.items()}
    for name, each in seen.items():
        found |= {f"{name}, {optimizer}": update["waits"] for optimizer, update in each["updates"].items()}
    return {name: places for name, places in found.items() if places}


def dearer(seen: Mapping[str, Any]) -> dict[str, Any]:
    """What costs more than the table allows; written again by `python tests/helpers/fake_cuda_cases.py`."""
    table = json.loads(fake_cuda_cases.TABLE.read_text())
    if table["torch"] != fake_cuda_cases.torch_version():
        return {}
    return {
        name: (cost, table["steps"][name])
        for name, cost in fake_cuda_cases.costs(seen).items()
        if any(value > table["steps"][name][key] for key, value in cost.items())
    }


def recorded(rows: Path, graphs: bool | str, **further: str) -> dict[str, Any]:
    """A step of several micro-steps with CUDA graphs."""
    case = fake_cuda_cases.case(rows, "electra", attention="sdpa", precision="bf16", optimizers=("adamw",))
    case["parameters"] |= {"cuda_graphs": graphs, "micro_batch_size": 2, "batch_size": {"-1": 8}}
    return {**case, "compiler": True, **further}


def recordings(rows: Path) -> dict[str, Any]:
    """Steps with CUDA graphs, as the user wants them and by default, and where they cannot be recorded."""
    return {
        "graphs by default": recorded(rows, "auto"), "none": recorded(rows, False),
        "refused": recorded(rows, "auto", fails="an operation of the host"),
        "graphs": recorded(rows, True), "too large": recorded(rows, "auto", fails="memory"),
    }  # fmt: skip


BY_DAY = ("graphs by default", "none", "refused")


def check_recordings(seen: Mapping[str, Mapping[str, Any]]) -> None:
    """All from ids to losses is to be recorded, nothing in it is what a graph cannot hold, and each micro-step begins
    by allowing graphs to write over the one before. Where that fails, the step is that of compiled blocks."""
    for name in {"graphs", "graphs by default"} & seen.keys():
        assert seen[name]["compile"] == [["whole", True]] and seen[name]["recorded"] and seen[name]["said"] == []
        assert seen[name]["marks"] == seen[name]["micro_steps"] == 4
        assert seen[name]["unrecordable"] == [] == seen[name]["waits"]
    words = {"none": [], "refused": ["an operation of the host"], "too large": ["the GPU has too little for that"]}
    words = {name: said for name, said in words.items() if name in seen}
    for name, said in words.items():
        assert seen[name]["compile"] == [*([["whole", True]] if said else []), ["blocks", False]]
        assert [line.startswith("CUDA graphs off: ") and line.endswith(said[0]) for line in seen[name]["said"]] == [
            True for _ in said
        ]
        assert not seen[name]["recorded"] and seen[name]["marks"] == 0
    costs = {name: {each: seen[name][each] for each in ("kernels", "bytes", "updates")} for name in words}
    assert all(cost == costs["none"] for cost in costs.values())


def check_bert_base(seen: Mapping[str, Mapping[str, Any]]) -> None:
    """A step of BERT-base, uncompiled: at most 800 kernels, and with fused ones 60 % of the 67 GB that it moved once.
    docs/design/bf16-stream.md has the figures."""
    steps = {
        fused: {key: each[key] + each["updates"]["adamw"][key] for key in ("kernels", "bytes")}
        for fused, each in seen.items()
    }
    assert all(each["kernels"] <= 800 for each in steps.values()), steps
    assert steps["auto"]["bytes"] <= 0.6 * 67e9, steps
    page = (Path(__file__).parents[3] / "docs" / "design" / "bf16-stream.md").read_text().split()
    auto, off = ((f"{each['bytes'] / 1e9:.1f}", each["kernels"]) for each in (steps["auto"], steps["off"]))
    text = "A whole step is {} GB in {} kernels, without fused kernels {} GB in {},".format(*auto, *off)
    assert fake_cuda_cases.torch_version() != "2.13" or text in " ".join(page), text


@pytest.mark.slow
def test_steps_on_a_gpu_neither_wait_nor_become_dearer(rows: Path, guard: Path, tmp_path: Path) -> None:
    cases = fake_cuda_cases.some_cases(rows)
    first = next(iter(cases.values()))
    first["dry_run"] = first["parameters"]["tf32"] = True
    first["parameters"]["deterministic"] = False
    broken = fake_cuda_cases.case(rows, "bert", attention="sdpa", precision="bf16", optimizers=("adamw",))
    cases |= {"broken": {**broken, "item_in_modules": True}, **fake_cuda_cases.some_presets(rows)}
    graphs = {name: each for name, each in recordings(rows).items() if name in BY_DAY}
    seen, measured = fake_cuda_cases.take({**cases, **graphs}, guard, tmp_path)
    read = seen.pop("broken")
    check_recordings({name: seen.pop(name) for name in graphs})
    assert {each["device"] for each in seen.values()} == {"cuda:0"}
    toys = {name: each["flash"] for name, each in seen.items() if "blocks" not in name}
    assert {name for name, flash in toys.items() if flash} == {name for name in toys if "flash" in name}
    assert not any(each["cudnn_attention"] for each in seen.values())
    assert [name for name, each in seen.items() if each["tf32"]] == [next(iter(seen))]
    assert [name for name, each in seen.items() if not each["deterministic"]] == [next(iter(seen))]
    assert waits(seen) == {}
    assert [name for name, each in seen.items() if each["unrecordable"]] == []
    assert dearer({name: each for name, each in seen.items() if each["deterministic"]}) == {}  # else it has more room
    # what the machine calls a wait: an `.item()` in any module, and every other way to ask for values
    assert len(read["waits"]) >= 15 and "_local_scalar_dense" in read["unrecordable"]
    assert {name for name, places in measured["ways"].items() if not places} == ALLOWED
    # operands of two dtypes are refused, as by a GPU's kernels
    assert {name: [bool(each) for each in said] for name, said in measured["refusals"].items()} == {
        name: [False, True] for name in measured["refusals"]
    }
    # what is only written is not read, and what is updated in place is both; `addmm` copies what it adds to
    assert {name: round(bytes_) for name, bytes_ in measured["bytes an element"].items()} == {
        "copy_": 6, "_foreach_copy_": 6, "bernoulli_": 2, "zeros_like": 4, "add_": 12, "addmm_": 16, "addmm": 24,
        "AdamW": 28,
    }  # fmt: skip
    # the loss of logits in bf16 reads them twice and writes them once; docs/design/losses.md has these numbers
    converted = [round(measured["bytes a logit"].pop(name)) for name in ("converted", "converted, torch's")]
    assert converted == [52, 44] or fake_cuda_cases.torch_version() != "2.13"
    assert all(6.0 <= bytes_ <= 6.1 for name, bytes_ in measured["bytes a logit"].items() if "bfloat16" in name)


IN_RUNS = {
    "log: step_health.wait_for_device": 5,  # for the numbers of each step since the last record
    "log: loss.take_means": 3,
    "vote: step_health.wait_for_device": 1,  # of the step before the last, while the last one still runs
    "validation: loss.take_means": 3,
    "save: loss.state": 2,
    "save: snapshot._wait_for_copies": 6,  # of the state, of tensors of plugins, of the model
}
"""How often a run of six steps waits for the device; see `fake_cuda_roads.train`. Steps without a record do not."""


@pytest.mark.nightly
def test_every_road_to_a_gpu_waits_at_known_places_alone(guard: Path, tmp_path: Path) -> None:
    seen = fake_cuda_cases.take({}, guard, tmp_path, roads=True)[1]["roads"]
    waits = {name: each["waits"] for name, each in seen.items()}
    assert waits.pop("train") == IN_RUNS | {"event: samples._fill": 6}
    assert waits["train causal"].pop("event: samples._continue") >= 9  # each token is read before the next one
    assert waits.pop("train causal") == IN_RUNS
    resumed = {place: count for place, count in waits.pop("resume").items() if not place.startswith("resume: ")}
    assert resumed == {
        "log: step_health.wait_for_device": 2, "log: loss.take_means": 1, "vote: step_health.wait_for_device": 1,
        "validation: loss.take_means": 1, "event: samples._fill": 2, "save: loss.state": 1,
        "save: snapshot._wait_for_copies": 3,
    }  # fmt: skip
    assert len(set(seen["train"]["seeds"])) == 6 and seen["resume"]["seeds"] == seen["train"]["seeds"][3:]
    # an evaluation reads its sums at the end, a training its losses; predictions and trained weights go to the host
    assert waits.pop("evaluate objective") == {"loss.take_means": 1}
    assert waits.pop("evaluate perplexity") == {"causal.evaluate": 1}
    assert waits.pop("evaluate pseudo-perplexity") == {"masked.evaluate": 1}
    for road in ("evaluate tasks", "finetune"):
        assert waits[road].pop("search.<dictcomp>") > 10
        assert waits.pop(road) == {"loop.train": 1, "loop.compute": 3}
    assert "predictions.fill_mask" in waits.pop("try masked") and "generation._generate" in waits.pop("try causal")
    assert waits == {"doctor": {}}


@pytest.mark.nightly
def test_no_architecture_no_optimizer_and_no_preset_waits_for_the_gpu(rows: Path, guard: Path, tmp_path: Path) -> None:
    checkpointed = fake_cuda_cases.case(rows, "llama", attention="sdpa", precision="bf16", optimizers=("adamw",))
    checkpointed["parameters"]["activation_checkpointing"] = "full"
    bert_base = {each: fake_cuda_cases.bert_base(rows, fused_kernels=each) for each in ("auto", "off")}
    cases = {**fake_cuda_cases.every_case(rows), **bert_base, **recordings(rows), "checkpointed": checkpointed}
    seen, _ = fake_cuda_cases.take(cases, guard, tmp_path)
    check_recordings({each: seen.pop(each) for each in recordings(rows)})
    check_bert_base({each: seen.pop(each) for each in bert_base})
    assert waits(seen) == {}
    del seen["checkpointed"]
    assert dearer(seen) == {}
    graphs = {name for name in fake_cuda_cases.presets() if seen[name]["recorded"]}
    assert {
        "bert_base",
        "bert_large",
        "electra_small",
        "electra_base",
        "gpt2_125m",
        "modernbert_base",
        "llama_1b",
    } <= graphs
    assert set(fake_cuda_cases.costs(seen)) == set(json.loads(fake_cuda_cases.TABLE.read_text())["steps"])
