"""Processes that divide the blocks of a model train what one process trains, and any engine reads their checkpoints.

One pair of processes runs most jobs: 7 rows per step, in micro-batches of 2 and a last one of 1; 5 blocks, so that
stages differ. Gradients are compared weight by weight, after replicas and stages have reduced them, before clipping.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pipeline_worker
import pytest
import torch
import toy
from killed_runs import kill_and_resume
from safetensors.torch import load_file
from selection import at_night, wanted
from transformers import AutoModelForCausalLM

from terakoya.plugins import registry
from terakoya_contract.toy import make_store, values

pytestmark = pytest.mark.timeout(600)  # most of it is for the runs that all tests share

LAST, MIDDLE = 3, 2
FAMILIES = ("gpt2", "gptj", "llama", "qwen3")
EACH = at_night(FAMILIES, always=("gpt2", "llama"))
"""Variants have the other ones."""
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout")
PAIR = {"pp_size": 2}
INTERLEAVED = {"pp_size": 2, "pp_stages_per_process": 2}
ZERO_BUBBLE = {**PAIR, "pp_schedule": "zero_bubble"}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("llama", {"precision": "bf16", "autocast": True, "activation_checkpointing": "selective"}),
    "fp16": ("gpt2", {"precision": "fp16", "loss_scaling": {"init_scale": 2.0**40, "backoff_factor": 2.0**-30}}),
    "head": ("gptj", {"objective": {"type": "causal_lm", "layout": "stream", "z_loss": 0.01, "head_positions": 5}}),
    "frozen": ("gpt2", {"frozen_layers": 2, "activation_checkpointing": "full"}),
    "muon": ("gpt2", {"optimizer": {"type": "muon", "learning_rate": 0.002, "adamw_learning_rate": 0.001}}),
    "adafactor": ("qwen3", {"optimizer": {"type": "adafactor", "learning_rate": 0.001}}),
    "few": ("llama", {"micro_batch_size": 7}),
}
"""Cases for a pair of processes: an architecture and changed settings."""


def settings(base: Path, name: str, *, dropout: float = 0.0, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a run of the architecture `name`."""
    component = registry().component("architectures", name)
    dropouts = {each: dropout for each in DROPOUTS if each in component.model_fields}
    return {
        "data": {
            "train": [str(base / "train/store")], "validation": [str(base / "validation/store")], "sequence_length": 32
        },
        "architecture": {"type": name, **values(component), **dropouts, "num_hidden_layers": 5},
        "objective": {"type": "causal_lm"},
        # with a large eps the update is nearly proportional to the gradient, so errors keep their size
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.1},
        "schedule": {"type": "linear"},
        "batch_size": {"-1": 7}, "micro_batch_size": 2, "max_steps": LAST, "logging_steps": 1,
        "max_grad_norm": 0.25,
        "checkpoint": {"save_steps": MIDDLE}, "evaluation": {"steps": MIDDLE, "batches": 2}, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: NAME of one process, NAME.pair of two, and others by the names in the tests."""
    base = tmp_path_factory.mktemp("pipeline")
    make_store(base / "train")
    make_store(base / "validation", documents=20)
    families = [name for name in FAMILIES if name in {"gpt2", "llama", *wanted(request, "name")}]
    subjects = {**{name: (name, {}) for name in families}, **VARIANTS}
    rows = {"0": 5, "1": 2}

    def job(out: str, name: str, resumed: str | None = None, **changes: Any) -> dict[str, Any]:
        checkpoint = None if resumed is None else str(base / resumed / f"checkpoints/step-{MIDDLE:08d}")
        found = settings(base, name, **changes)
        return {"out": str(base / out), "settings": found, "start_from": checkpoint}

    alone = [job(out, name, **changes) for out, (name, changes) in subjects.items()]
    pair = [job(f"{out}.pair", name, **changes, parallel=PAIR) for out, (name, changes) in subjects.items()]
    pair += [
        job("gpt2.interleaved", "gpt2", parallel=INTERLEAVED),
        job("uneven.interleaved", "gpt2", parallel=INTERLEAVED, micro_batch_size=1, batch_size={"-1": 5}),
        job("few.interleaved", "llama", parallel=INTERLEAVED, micro_batch_size=7),
        job("gpt2.zero_bubble", "gpt2", parallel={**ZERO_BUBBLE, **INTERLEAVED}),
        job("llama.zero_bubble", "llama", parallel=ZERO_BUBBLE),
        job("few.zero_bubble", "llama", parallel=ZERO_BUBBLE, micro_batch_size=7),
        job("drawn", "llama", dropout=0.1, parallel=PAIR, activation_checkpointing="full"),
        job("drawn.resumed", "llama", "drawn", dropout=0.1, parallel=PAIR, activation_checkpointing="full"),
    ]
    uneven = job("uneven", "gpt2", micro_batch_size=1, batch_size={"-1": 5})
    four = [job(f"{name}.replicas", name, parallel=PAIR, batch_size=rows) for name in ("gpt2", "llama")]
    back = [job(f"{name}.to_one", name, f"{name}.pair") for name in ("gpt2", "llama")]
    forth = [job(f"{name}.to_pair", name, name, parallel=PAIR) for name in ("gpt2", "llama")]
    finished = str(base / f"llama.pair/checkpoints/step-{LAST:08d}/model")
    back.append(job("started", "llama", start_from=finished))
    forth.append(job("started.pair", "llama", start_from=finished, parallel=PAIR))
    together(
        lambda: pipeline_worker.run([*alone, uneven], (1,)),
        lambda: (base / "said.txt").write_text(pipeline_worker.run(pair, (2,), replica_size=2)),
    )
    together(
        lambda: pipeline_worker.run(back, (1,)),
        lambda: pipeline_worker.run(forth, (2,), replica_size=2),
        lambda: pipeline_worker.run(four, (2, 2), replica_size=2),
    )
    return base


def together(*actions: Callable[[], Any]) -> None:
    """Runs `actions` at the same time; raises the first error."""
    with ThreadPoolExecutor(len(actions)) as pool:
        for each in [pool.submit(action) for action in actions]:
            each.result()


def model(out: Path, step: int = LAST) -> dict[str, torch.Tensor]:
    return load_file(out / f"checkpoints/step-{step:08d}/model/model.safetensors")


def error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest error of a tensor relative to its own norm, or to a thousandth of the largest one's."""
    assert one.keys() == other.keys() and one
    least = 1e-3 * max(float(value.double().norm()) for value in one.values())
    return max(
        float((one[name].double() - other[name].double()).norm()) / max(float(one[name].double().norm()), least)
        for name in one
    )


def assert_same_run(one: Path, other: Path, tolerance: float, steps: Sequence[int] = range(1, LAST + 1)) -> None:
    """Asserts equal gradients, losses, norms, validation results and weights."""
    for step in steps:
        found = error(pipeline_worker.gradients(one, step - 1), pipeline_worker.gradients(other, step - 1))
        assert found <= tolerance, f"gradients of step {step}: {found:.1e}"
    losses, others = toy.losses(one), toy.losses(other)
    for step in steps:
        assert others[step] == pytest.approx(losses[step], rel=tolerance, abs=0.0), step
    assert error(pipeline_worker.weights(one), pipeline_worker.weights(other)) <= tolerance
    said, seen = (toy.records(out, "validation") for out in (one, other))
    assert seen.keys() & said.keys()
    for step in seen.keys() & said.keys():
        assert seen[step]["loss"] == pytest.approx(said[step]["loss"], rel=tolerance)
        assert seen[step]["token_accuracy"] == pytest.approx(said[step]["token_accuracy"], abs=tolerance)
        assert seen[step].keys() == said[step].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_a_pair_trains_what_one_process_trains(runs: Path, name: str) -> None:
    assert_same_run(runs / name, runs / f"{name}.pair", 1e-6)
    assert "token_accuracy" not in toy.records(runs / f"{name}.pair")[LAST], "only validation counts it"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"bf16", "fp16", "muon"}))
def test_a_pair_trains_what_one_process_trains_with_other_settings(runs: Path, name: str) -> None:
    assert_same_run(runs / name, runs / f"{name}.pair", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "muon"])
def test_bf16_is_close(runs: Path, name: str) -> None:
    assert_same_run(runs / name, runs / f"{name}.pair", 1e-2)


@pytest.mark.slow
def test_several_stages_on_each_process(runs: Path) -> None:
    assert_same_run(runs / "gpt2", runs / "gpt2.interleaved", 1e-6)
    assert_same_run(runs / "uneven", runs / "uneven.interleaved", 1e-6)
    assert_same_run(runs / "few", runs / "few.interleaved", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "few"])
def test_gradients_of_weights_apart_from_those_of_hidden_states(runs: Path, name: str) -> None:
    """GPT-2 with two stages on each process, and a matrix that is both embedding and head."""
    assert_same_run(runs / name, runs / f"{name}.zero_bubble", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_replicas_with_uneven_rows(runs: Path, name: str) -> None:
    """One replica has three micro-batches, the other one and two empty ones."""
    assert_same_run(runs / name, runs / f"{name}.replicas", 1e-6)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_no_stage(runs: Path) -> None:
    """In fp16 the first step overflows, and the scale falls on all processes alike."""
    losses, alone = toy.losses(runs / "fp16.pair"), toy.losses(runs / "fp16")
    assert losses[1][1] is None, "a norm that is not finite is written as null"
    assert [losses[step] for step in (2, 3)] == [pytest.approx(alone[step], rel=1e-4) for step in (2, 3)]
    assert toy.records(runs / "fp16.pair")[LAST]["skipped_steps"] == 1
    assert error(pipeline_worker.weights(runs / "fp16"), pipeline_worker.weights(runs / "fp16.pair")) <= 1e-3


@pytest.mark.slow
def test_the_norm_is_that_of_all_stages(runs: Path) -> None:
    for name in ("gpt2", "llama"):
        norm = toy.losses(runs / f"{name}.pair")[1][1]
        gradients = pipeline_worker.gradients(runs / f"{name}.pair", 0)
        total = torch.stack([value.double().square().sum() for value in gradients.values()]).sum().sqrt()
        assert norm == pytest.approx(float(total), rel=1e-6), "a tied matrix counts once"
        assert norm > 0.5, "the gradient is clipped"


@pytest.mark.slow
def test_resumed_in_the_same_world_is_bit_identical(runs: Path) -> None:
    """With dropout, which activation checkpointing recomputes."""
    straight, resumed = runs / "drawn", runs / "drawn.resumed"
    assert toy.losses(resumed) == {LAST: toy.losses(straight)[LAST]}
    for one, other in (
        (pipeline_worker.gradients(straight, LAST - 1), pipeline_worker.gradients(resumed, LAST - 1)),
        (pipeline_worker.weights(straight), pipeline_worker.weights(resumed)),
        (model(straight), model(resumed)),
    ):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_resumes_with_and_without_stages(runs: Path, name: str) -> None:
    for resumed in (f"{name}.to_one", f"{name}.to_pair"):
        assert_same_run(runs / name, runs / resumed, 1e-6, steps=[LAST])


@pytest.mark.slow
def test_weights_read_by_rank_0_reach_all_ranks(runs: Path) -> None:
    assert_same_run(runs / "started", runs / "started.pair", 1e-6)
    assert toy.losses(runs / "started")[1] != toy.losses(runs / "llama")[1], "the weights of the folder were read"


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_saved_models_are_in_transformers_format(runs: Path, name: str) -> None:
    """The weights of the last step, from both processes, under Transformers' names."""
    loaded = AutoModelForCausalLM.from_pretrained(runs / f"{name}.pair/checkpoints/step-{LAST:08d}/model").eval()
    trained = pipeline_worker.weights(runs / f"{name}.pair")
    assert {key.removeprefix("model."): value for key, value in trained.items()}.keys() == dict(
        loaded.named_parameters()
    ).keys()
    for key, value in loaded.named_parameters():
        assert torch.equal(value, trained[f"model.{key}"]), key
    alone = AutoModelForCausalLM.from_pretrained(runs / f"{name}/checkpoints/step-{LAST:08d}/model").eval()
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, alone(ids).logits, atol=1e-5)


@pytest.mark.slow
def test_idle_stages_print_a_warning(runs: Path) -> None:
    said = (runs / "said.txt").read_text()
    for stages, jobs in ((2, 2), (4, 1)):  # "few", also with the zero-bubble schedule, and "few.interleaved"
        assert said.count(f"parallel.pp_size: {stages} stages share 1 micro-batch in a step") == jobs


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_with_stages_between_the_first_and_the_last(runs: Path, name: str, tmp_path: Path) -> None:
    """One replica on two nodes."""
    given = settings(runs, name, parallel={"pp_size": 4}, batch_size={"0": 4, "1": 3})
    pipeline_worker.run([{"out": str(tmp_path / "four"), "settings": given}], (1, 3), replica_size=4)
    assert_same_run(runs / name, tmp_path / "four", 1e-6)


@pytest.mark.slow
def test_killed_and_resumed_on_the_command_line(runs: Path, tmp_path: Path) -> None:
    given = {**settings(runs, "gpt2", dropout=0.1), "max_steps": 4}
    kill_and_resume(given, tmp_path, "--set", "parallel.pp_size=2", nodes=(2,), after=3, resumed_at=MIDDLE)
    one, other = model(tmp_path / "cut", 4), model(tmp_path / "straight", 4)
    assert all(torch.equal(one[key], other[key]) for key in one)
