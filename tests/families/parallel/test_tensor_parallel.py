"""Processes that divide matrix products train what one process trains, and any engine reads their checkpoints.

Two worlds run every job: two processes, one replica; and four, on two nodes, which are two replicas with 5 and 2 rows
in micro-steps of 2, or one replica of four.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensor_worker
import torch
import toy
import worlds
from engine_runs import UNVALIDATED, assert_close, assert_same_losses, here
from selection import at_night, wanted
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

LAST, MIDDLE = 2, 1
CLOSE = 5e-6
"""Tolerance of a weight's gradient, relative to its norm: the largest observed error is 2e-6, of qwen3's query norm."""
REPLACED = {"type": "replaced_token", "mlm_probability": 0.2, "generator_size": "1/2"}
MASKED, CAUSAL = {"type": "masked_lm", "mlm_probability": 0.2}, {"type": "causal_lm", "append_eos": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "type": "gpt2", "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "n_inner": 36,
        "max_position_embeddings": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "gptj": {
        "type": "gptj", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "rotary_dim": 2,
        "max_position_embeddings": 32,
    },
    "llama": {
        "type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 34, "max_position_embeddings": 32,
    },
    "qwen3": {
        "type": "qwen3", "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 6, "intermediate_size": 34, "max_position_embeddings": 32,
    },
    "bert": {
        "type": "bert", "hidden_size": 18, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 34,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "electra": {
        "type": "electra", "embedding_size": 14, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "intermediate_size": 36, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "roberta": {
        "type": "roberta", "hidden_size": 18, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 34,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
ENCODERS = ("bert", "roberta")
NAMES = at_night(ARCHITECTURES, always=("gpt2", "llama", "bert", "electra"))
VOCABULARY = ("word_embeddings", "wte", "embed_tokens", "lm_head.weight", "lm_head.bias", "predictions.bias")
"""Parts of the names of embeddings and vocabulary heads."""


def settings(store: Path, validation: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of one process with the architecture `name`."""
    return {
        **toy.parameters(store, validation, batch_size={"-1": 7}, micro_batch_size=2, max_steps=LAST),
        # weights large enough for attention to matter
        "architecture": {**ARCHITECTURES[name], "initializer_range": 0.2},
        "objective": REPLACED if name == "electra" else MASKED if name in ENCODERS else CAUSAL,
        # with a large eps the update is nearly proportional to the gradient, so errors keep their size
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.1},
        "checkpoint": {"save_steps": 1},
        "evaluation": {"steps": MIDDLE, "batches": 2},
        **changes,
    }


PAIR = {"parallel": {"tp_size": 2}}
"""Changes that make `settings` one replica of two processes."""
NODES = {"batch_size": {"0": 5, "1": 2}}
REPLICAS = {**PAIR, **NODES}
"""Two replicas of two processes, each on its own node, with 5 rows and with 2."""
FOUR = {"parallel": {"tp_size": 4}, **NODES}
"""One replica of four processes, on both nodes."""


def state(out: Path, kind: str, step: int = LAST) -> dict[str, torch.Tensor]:
    return toy.saved(out / f"checkpoints/step-{step:08d}", kind)


def gradients(out: Path) -> dict[str, torch.Tensor]:
    """The first step's gradient of each weight, after clipping: AdamW's first moment is then a tenth of it."""
    return {name: 10 * value for name, value in state(out, "optimizer", 1).items() if name.endswith("/exp_avg")}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of all runs."""
    names = [name for name in ARCHITECTURES if name in {"gpt2", "llama", *wanted(request, "name")}]
    base = tmp_path_factory.mktemp("tensor")
    pair: list[dict[str, Any]] = []
    four: list[dict[str, Any]] = []

    def add(jobs: list[dict[str, Any]], run: str, name: str, **changes: Any) -> None:
        extra = {key: changes.pop(key) for key in ("start_from", "poison") if key in changes}
        jobs.append({"out": str(base / run), "settings": settings(store, validation_store, name, **changes), **extra})

    def from_step(run: str) -> str:
        return str(base / f"{run}/checkpoints/step-{MIDDLE:08d}")

    for name in names:
        here(base / f"plain_{name}", settings(store, validation_store, name))
        add(pair, f"pair_{name}", name, **PAIR)
        add(pair, f"resumed_{name}", name, start_from=from_step(f"pair_{name}"), **PAIR)
        add(pair, f"from_plain_{name}", name, start_from=from_step(f"plain_{name}"), **PAIR, **UNVALIDATED)
        add(four, f"replicas_{name}", name, **REPLICAS)
    add(four, "four_gpt2", "gpt2", **FOUR, **UNVALIDATED)
    for name in {"gpt2", "qwen3"}.intersection(names):
        here(base / f"plain_clipped_{name}", settings(store, validation_store, name, **CLIPPED))
        add(four, f"clipped_{name}", name, **CLIPPED, **REPLICAS)
    started = {
        "start_from": str(base / f"plain_llama/checkpoints/step-{LAST:08d}/model"),
        "frozen_layers": 1,
        **UNVALIDATED,
    }
    frozen = settings(store, validation_store, "llama", **started)
    here(base / "plain_frozen", frozen)
    four.append({"out": str(base / "frozen"), "settings": {**frozen, **REPLICAS}})
    for run, changes in OTHERS.items():
        here(base / f"plain_{run}", settings(store, validation_store, "llama", **changes))
        add(pair, run, "llama", **changes, **PAIR)
    for kind in (None, "full", "selective"):
        add(pair, f"dropout_{kind}", "gpt2", **DROPOUT, **PAIR, activation_checkpointing=kind)
    add(four, "poison", "gpt2", **REPLICAS, start_from=from_step("replicas_gpt2"), poison=True)
    for jobs, nodes in ((pair, (2,)), (four, (2, 2))):
        toy.finish(worlds.start(partial(tensor_worker.work, jobs), nodes, base / "said"))
    for name in names:
        here(
            base / f"to_plain_{name}",
            settings(store, validation_store, name, **UNVALIDATED),
            Path(from_step(f"pair_{name}")),
        )
    return base


CLIPPED = {"max_grad_norm": 0.01, **UNVALIDATED}
OTHERS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "autocast": True, **UNVALIDATED},
    "lion": {
        "optimizer": {"type": "lion", "learning_rate": 1e-3, "weight_decay": 0.1}, "evaluation": None,
        "checkpoint": {"save_steps": 1, "async_save": True},
    },
    "fp16": {
        "precision": "fp16", "evaluation": None, "max_steps": 3,
        "loss_scaling": {"init_scale": 2.0**40, "backoff_factor": 2.0**-24},
    },
    "head_in_parts": {"objective": {**CAUSAL, "head_positions": 5}},
    "z_loss": {"objective": {**CAUSAL, "head_positions": 5, "z_loss": 0.1}},
    "full": {"activation_checkpointing": "full", "evaluation": None},
    "selective": {"activation_checkpointing": "selective", "evaluation": None},
}  # fmt: skip
"""The first step in fp16 overflows; later steps fit into the lower scale."""
DRAWN_STEPS = 4
"""Steps with dropout: 16 micro-batches, and the first in which two processes draw otherwise makes weights differ."""
DROPOUT = {
    "architecture": {**ARCHITECTURES["gpt2"], "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.3},
    "max_steps": DRAWN_STEPS, "checkpoint": {"save_steps": DRAWN_STEPS}, "evaluation": None,
}  # fmt: skip


WORLDS = [(f"{kind}_{name}", name) for name in ARCHITECTURES for kind in ("pair", "replicas")] + [("four_gpt2", "gpt2")]
WORLDS = at_night(WORLDS, always=[world for world in WORLDS if world[1] in NAMES])


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compares each tensor's error with its own norm. BERT's key biases do not change the softmax and their gradients
    are only rounding: their errors are compared with the norm of everything."""
    every = torch.cat([value.double().flatten() for value in first.values()]).norm()
    assert first.keys() == second.keys()
    for name in first:
        error = (first[name].double() - second[name].double()).norm()
        norm = every if "key.bias" in name else first[name].double().norm()
        assert error <= tolerance * norm, f"{name}: {error / norm:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(("run", "name"), WORLDS)
def test_gradients_are_those_of_one_process(runs: Path, run: str, name: str) -> None:
    assert_same(gradients(runs / f"plain_{name}"), gradients(runs / run), CLOSE)
    assert_same_losses(runs / f"plain_{name}", runs / run, CLOSE)
    assert_same(state(runs / f"plain_{name}", "model"), state(runs / run, "model"), CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(("gpt2", "qwen3"), always=("gpt2",)))
def test_clipping_is_that_of_one_process(runs: Path, name: str) -> None:
    plain, mine = runs / f"plain_clipped_{name}", runs / f"clipped_{name}"
    assert toy.losses(mine)[1][1] > 10 * CLIPPED["max_grad_norm"], "the gradient is clipped"
    assert_same_losses(plain, mine, CLOSE)
    assert_same(gradients(plain), gradients(mine), CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "name"), WORLDS)
def test_replicated_weights_stay_equal_and_divided_ones_across_replicas(runs: Path, run: str, name: str) -> None:
    found = json.loads((runs / run / "alike.json").read_text())
    whole, cut = ([each for each in found.values() if each["whole"] is kind] for kind in (True, False))
    vocabulary = [name for name in found if any(part in name for part in VOCABULARY)]
    assert vocabulary and not any(found[each]["whole"] for each in vocabulary), "embeddings and heads are divided"
    assert len(cut) >= 2 * 4 and {each["values"] for each in cut} == {4 if run == "four_gpt2" else 2}
    assert {each["values"] for each in whole} == {1}
    assert all(each["replicas"] for each in found.values())


@pytest.mark.slow
def test_replicated_weights_stay_equal_under_dropout(runs: Path) -> None:
    """Steps in which all processes of a replica have the same dropout outside of parallel regions."""
    for kind in ("None", "full", "selective"):
        found = json.loads((runs / f"dropout_{kind}/alike.json").read_text())
        assert {each["values"] for each in found.values() if each["whole"]} == {1}
        for part in ("model", "optimizer"):
            assert_same(
                state(runs / "dropout_None", part, DRAWN_STEPS), state(runs / f"dropout_{kind}", part, DRAWN_STEPS), 0.0
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_validation_is_that_of_one_process(runs: Path, name: str) -> None:
    accuracy = {"electra": "generator_accuracy"}.get(name, f"{'masked' if name in ENCODERS else 'token'}_accuracy")
    for run in (f"pair_{name}", f"replicas_{name}"):
        plain, mine = (toy.records(runs / each, "validation") for each in (f"plain_{name}", run))
        assert plain.keys() == mine.keys() == {0, MIDDLE, LAST}
        for step in plain:
            for value in ("loss", accuracy):
                assert mine[step][value] == pytest.approx(plain[step][value], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_bit_identical(runs: Path, name: str) -> None:
    straight, resumed = runs / f"pair_{name}", runs / f"resumed_{name}"
    assert set(toy.losses(resumed)) == set(range(MIDDLE + 1, LAST + 1))
    assert_same_losses(straight, resumed, 0.0)
    for part in ("model", "optimizer"):
        assert_close(state(straight, part), state(resumed, part), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_move_to_one_process_and_back(runs: Path, name: str) -> None:
    plain = runs / f"plain_{name}"
    shapes = {each: value.shape for each, value in state(plain, "optimizer").items()}
    for run in (f"from_plain_{name}", f"to_plain_{name}"):
        assert set(toy.losses(runs / run)) == set(range(MIDDLE + 1, LAST + 1))
        assert_same_losses(plain, runs / run, CLOSE)
        assert_same(state(plain, "model"), state(runs / run, "model"), CLOSE)
        assert {each: value.shape for each, value in state(runs / run, "optimizer").items()} == shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plain_transformers_loads_what_was_trained(runs: Path, name: str) -> None:
    """With the weights of the checkpoint, and the logits of the model that one process trained."""
    kind = AutoModelForCausalLM if name not in (*ENCODERS, "electra") else AutoModelForMaskedLM
    model, folder = ("generator", "model/generator") if name == "electra" else ("model", "model")
    plain, mine = (
        kind.from_pretrained(runs / f"{run}_{name}/checkpoints/step-{LAST:08d}" / folder, local_files_only=True)
        for run in ("plain", "pair")
    )
    values = state(runs / f"pair_{name}", "model")
    for each, value in mine.named_parameters():
        assert torch.equal(value, values[f"{model}.{each}"]), each
    ids = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_bf16_is_autocast_over_fp32_weights(runs: Path) -> None:
    plain, mine = runs / "plain_bf16", runs / "bf16"
    assert_same_losses(plain, mine, 1e-2)
    assert_close(state(plain, "model"), state(mine, "model"), 1e-2)
    assert {value.dtype for value in state(mine, "model").values()} == {torch.float32}
    exact = toy.losses(runs / "pair_llama")
    assert any(abs(loss - exact[step][0]) > 1e-5 for step, (loss, _) in toy.losses(mine).items()), (
        "the run computed in fp32"
    )


@pytest.mark.slow
@pytest.mark.parametrize("run", ["head_in_parts", "z_loss"])
def test_losses_of_a_divided_vocabulary_are_those_of_one_process(runs: Path, run: str) -> None:
    plain, mine = runs / f"plain_{run}", runs / run
    assert_same_losses(plain, mine, CLOSE)
    assert_same(gradients(plain), gradients(mine), CLOSE)
    for step, record in toy.records(plain, "validation").items():
        assert toy.records(mine, "validation")[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)


@pytest.mark.slow
def test_fp16_skips_the_same_steps(runs: Path) -> None:
    plain, mine = (toy.records(runs / run) for run in ("plain_fp16", "fp16"))
    for step, each in plain.items():
        assert (mine[step]["loss_scale"], mine[step]["skipped_steps"]) == (2.0**16, 1)
        assert (each["loss_scale"], each["skipped_steps"]) == (2.0**16, 1)
        assert mine[step]["loss"] == pytest.approx(each["loss"], rel=1e-2)
    assert_close(state(runs / "plain_fp16", "model", 3), state(runs / "fp16", "model", 3), 1e-2)


@pytest.mark.slow
def test_lion_takes_the_same_steps(runs: Path) -> None:
    """Lion's updates are signs: where a gradient is nearly zero, rounding may flip one."""
    plain, mine = state(runs / "plain_lion", "model"), state(runs / "lion", "model")
    learnt = [name for name in plain if not name.endswith("key.bias")]  # whose gradient is 0, so its sign is rounding
    apart = sum(int(((plain[name] - mine[name]).abs() > 1e-6).sum()) for name in learnt)
    assert apart <= sum(plain[name].numel() for name in learnt) / 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(runs: Path, kind: str) -> None:
    assert_same_losses(runs / "pair_llama", runs / kind, 0.0)
    for part in ("model", "optimizer"):
        assert_close(state(runs / "pair_llama", part), state(runs / kind, part), 0.0)


@pytest.mark.slow
def test_frozen_layers_stay_as_read_by_rank_0(runs: Path) -> None:
    plain, mine = runs / "plain_frozen", runs / "frozen"
    assert_same_losses(plain, mine, CLOSE)
    assert_close(state(plain, "model"), state(mine, "model"), CLOSE)
    assert_close(state(plain, "optimizer"), state(mine, "optimizer"), 1e-5)
    first, last = state(runs / "plain_llama", "model"), state(mine, "model")
    frozen = [name for name in first if ".layers.0." in name or "embed_tokens" in name]
    assert len(frozen) == 10 and all(torch.equal(first[name], last[name]) for name in frozen)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(runs: Path) -> None:
    bad, good = [False, True], [True, False]
    assert json.loads((runs / "poison/poison.json").read_text()) == [[bad, bad, good]] * 4
