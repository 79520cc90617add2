"""Processes that divide the positions of rows train as plain Transformers does, document by document."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sequence_worker
import torch
import torch.nn.functional as F
import toy
import worlds
from safetensors.torch import load_file
from selection import at_night, wanted

from terakoya.components import Batch
from terakoya.config.parameters import Parameters
from terakoya.rows.stores import Stores
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module
from terakoya_contract import toy as small

LENGTH = 48
"""Two or three documents of the store below."""
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
BERT = {
    "type": "bert",
    **SIZES,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {"type": "gpt2", **SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"type": "llama", **SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
QWEN3 = {
    "type": "qwen3", **SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 6,
    "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
}  # fmt: skip
CAUSAL = {"type": "causal_lm"}
JOBS: dict[str, dict[str, Any]] = {
    "gpt2": {"architecture": GPT2},
    "llama": {"architecture": LLAMA},
    "qwen3": {"architecture": QWEN3},
    "bert": {"architecture": BERT, "objective": {"type": "masked_lm"}},
    "one_key_head": {"architecture": {**LLAMA, "num_key_value_heads": 1}},
    "eager": {"architecture": GPT2, "attention": "eager"},
    "stream": {"architecture": GPT2, "objective": {**CAUSAL, "layout": "stream"}},
    "bf16": {"architecture": QWEN3, "precision": "bf16", "autocast": True},
    "selective": {"architecture": LLAMA, "activation_checkpointing": "selective"},
    "gathered_bert": {"architecture": BERT, "objective": {"type": "masked_lm"}, "parallel": {"cp_size": 2}},
    "gathered_gpt2": {"architecture": GPT2, "attention": "eager", "parallel": {"cp_size": 2}},
    "gathered_qwen3": {"architecture": QWEN3, "parallel": {"cp_size": 2}},
    "gathered_three_heads": {
        "architecture": {**LLAMA, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
        "parallel": {"cp_size": 2},
    },
    "gathered_bf16": {"architecture": QWEN3, "precision": "bf16", "autocast": True, "parallel": {"cp_size": 2}},
}
"""Two processes, one replica."""
PAIRS = ("llama", "bert")
"""Four processes, two replicas."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of short documents."""
    return small.make_store(tmp_path_factory.mktemp("short"), documents=60).folder


def settings(store: Path, processes: int, **changes: Any) -> dict[str, Any]:
    """The parameter JSON: of 5 rows, two replicas have 3 and 2, in two micro-steps and in one."""
    base = toy.parameters(
        store, store, objective=CAUSAL, batch_size={"-1": 5}, micro_batch_size=2, max_steps=4, max_grad_norm=0.0
    )
    base["data"]["sequence_length"] = LENGTH
    return {**base, **({"parallel": {"sp_size": processes}} if processes > 1 else {}), **changes}


def start(jobs: Mapping[str, Any], folder: Path, processes: int) -> list[toy.Process]:
    """Starts `processes` processes, in replicas of two, that run `jobs` into `folder`."""
    work = partial(sequence_worker.work, jobs, folder)
    return worlds.start(work, (processes,), folder, replica_size=min(processes, 2))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three worlds: `one` process, `two` of one replica, `four` of two."""
    base = tmp_path_factory.mktemp("sequence")
    alone = {"bf16": settings(documents, 1, **JOBS["bf16"])}
    named = {"llama", "selective", *wanted(request, "name"), *wanted(request, "job")}
    two = {name: settings(documents, 2, **changes) for name, changes in JOBS.items() if name in named}
    four = {name: settings(documents, 2, **JOBS[name]) for name in PAIRS}
    worlds = [start(alone, base / "one", 1), start(two, base / "two", 2), start(four, base / "four", 4)]
    for world in worlds:
        toy.finish(world)
    return base


class Reference:
    """The results of plain Transformers for the same rows in float64, each document by itself."""

    def __init__(self, parameters: Parameters, batch: Batch) -> None:
        self.module = build_module(parameters, Stores.open(parameters.data).vocabulary).double()
        (model,) = parameters.objective.exports(self.module).values()
        attention.release(model)
        arrays = batch.arrays
        documents, ids, positions = (arrays[name] for name in ("document_ids", "input_ids", "position_ids"))
        labels = arrays.get("labels")
        if labels is None:
            flat = np.full(documents.size, -100)
            used = arrays["masked_labels"] >= 0
            flat[arrays["masked_positions"][used]] = arrays["masked_labels"][used]
            labels = flat.reshape(documents.shape)
        self.total, self.right = torch.zeros((), dtype=torch.float64), 0
        for row in range(len(documents)):
            for document in np.unique(documents[row][documents[row] >= 0]):
                here = documents[row] == document
                logits = model(
                    input_ids=torch.from_numpy(ids[row][here])[None],
                    position_ids=torch.from_numpy(positions[row][here])[None],
                ).logits[0]
                expected = torch.from_numpy(labels[row][here])
                self.total = self.total + F.cross_entropy(logits, expected, ignore_index=-100, reduction="sum")
                self.right += int((logits.argmax(-1) == expected).sum())
        self.count = int((labels >= 0).sum())
        self.documents = [len(np.unique(row[row >= 0])) for row in documents]

    @property
    def loss(self) -> float:
        return float(self.total.detach()) / self.count

    def gradients(self) -> dict[str, torch.Tensor]:
        (self.total / self.count).backward()
        return {name: each.grad for name, each in self.module.named_parameters() if each.grad is not None}


def reference(settings: Mapping[str, Any], *, validation: bool = False) -> Reference:
    """The reference for the rows of the first step, or of the validation."""
    parameters = Parameters.from_dict(settings, source="test")
    stores = Stores.open(parameters.data)
    objective = parameters.objective
    if validation:
        (source,) = stores.validation_rows(objective.row_layout(), seed=parameters.seed).values()
        rows = source.load(0, source.spread(min(len(source), 10)))
    else:
        rows = stores.loader(objective.row_layout(), seed=parameters.seed, global_rows=5).load(0, 5)
    return Reference(parameters, objective.collate(rows, stores.vocabulary))


def relative_error(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    difference = sum((got[name].double() - expected[name].double()).square().sum() for name in expected)
    return float((difference / sum(each.double().square().sum() for each in expected.values())).sqrt())


def gradients(folder: Path, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.{rank}.safetensors")


def numbers(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.{rank}.json").read_text())
    return found


WORLDS = [*(("two", name) for name in JOBS if "bf16" not in name), *(("four", name) for name in PAIRS)]
ALWAYS = [
    *(("two", name) for name in ("qwen3", "bert", "gathered_three_heads")),
    ("four", "llama"),
]
LOSSES = dict.fromkeys(("bert", "gathered_bert"), ("mlm_loss", "masked_accuracy"))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), at_night(WORLDS, always=ALWAYS))
def test_it_trains_as_plain_transformers_does(runs: Path, world: str, name: str, documents: Path) -> None:
    given = settings(documents, 1, **JOBS[name])
    said, loss = numbers(runs / world, name), LOSSES.get(name, ("lm_loss", "token_accuracy"))
    expected = reference(given)
    if name != "stream":
        assert max(expected.documents) > 2, "several documents in a row"
    assert said[loss[0]] == pytest.approx(expected.loss, rel=1e-6)
    exact = expected.gradients()
    assert relative_error(gradients(runs / world, name), exact) <= 1e-6
    other = gradients(runs / world, name, rank=1)
    assert relative_error(gradients(runs / world, name), other) == 0.0, "the same on every process"

    (validated,) = said["validation"]
    expected = reference(given, validation=True)
    assert validated["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert validated[loss[1]] == expected.right / expected.count


@pytest.mark.slow
@pytest.mark.parametrize("job", at_night(("bf16", "gathered_bf16"), always=("bf16",)))
def test_bf16_is_near_one_process(runs: Path, job: str) -> None:
    one, two = gradients(runs / "one", "bf16"), gradients(runs / "two", job)
    assert 0.0 < relative_error(two, one) <= 1e-2
    for name in ("loss", "token_accuracy"):
        got, expected = (
            numbers(*place)["validation"][0][name] for place in ((runs / "two", job), (runs / "one", "bf16"))
        )
        assert got == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit(runs: Path) -> None:
    assert relative_error(gradients(runs / "two", "selective"), gradients(runs / "two", "llama")) == 0.0


@pytest.mark.slow
def test_each_process_draws_its_own_dropout(runs: Path) -> None:
    assert [numbers(runs / "four", "llama", rank)["dropout_rank"] for rank in range(4)] == [0, 1, 2, 3]
