"""Runs of every engine next to those of one process: each is trained when the first test asks for it, and kept.

The rows of a step are divided unevenly, in micro-steps of 2, so that some processes run empty ones. With an `eps` of 1
updates are nearly proportional to gradients, so that errors show as they are, and every gradient is clipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers
import worlds
from engine_work import train
from safetensors.torch import load_file
from start_folders import spread
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.distributed.context import DistributedContext
from terakoya.training.checkpoint.event_tensors import SavedEventTensors, plugins_in
from terakoya.training.setup import StartOptions, train_in_this_process

LAST = 2
STAGES = (0, 1, 2, 3)
ONE, TWO, THREE, FOUR = (1,), (1, 1), (1, 1, 1), (2, 2)
ROWS = {1: {"-1": 7}, 2: {"0": 5, "1": 2}, 3: {"0": 4, "1": 2, "2": 1}}
"""By the number of nodes."""
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

MASKED, CAUSAL = {"type": "masked_lm", "mlm_probability": 0.2}, {"type": "causal_lm", "append_eos": False}
REPLACED = {"type": "replaced_token", "mlm_probability": 0.2, "generator_size": "1/2"}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
COMMON = {"num_hidden_layers": 2, "max_position_embeddings": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "type": "gpt2", "hidden_size": 20, "num_attention_heads": 4, "n_inner": 36,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "gptj": {"type": "gptj", "hidden_size": 24, "num_attention_heads": 6, "rotary_dim": 2},
    "llama": {
        "type": "llama", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 34,
    },
    "qwen3": {
        "type": "qwen3", "hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "intermediate_size": 34,
    },
    "bert": {"type": "bert", "hidden_size": 18, "num_attention_heads": 6, "intermediate_size": 34, **DRY},
    "roberta": {"type": "roberta", "hidden_size": 18, "num_attention_heads": 6, "intermediate_size": 34, **DRY},
    "odd": {"type": "bert", "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 33, **DRY},
    "electra": {
        "type": "electra", "embedding_size": 14, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 36,
        **DRY,
    },
}  # fmt: skip
"""Of `odd` no size is divisible by two."""
OBJECTIVES = dict.fromkeys(("bert", "roberta", "odd"), MASKED) | {"electra": REPLACED}
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"r": 3, "target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"]},
    "gpt2": {"r": 2, "target_modules": ["c_attn", "c_proj", "c_fc"], "use_rslora": True},
    "bert": {"r": 2, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
    "odd": {"r": 2, "target_modules": "all-linear"},
}
"""In gpt2 over matrices side by side, in bert also over layers that are not divided."""
UNVALIDATED: dict[str, Any] = {"evaluation": None}
OVERFLOW: dict[str, Any] = {
    "precision": "fp16", "loss_scaling": {"init_scale": 2.0**40, "backoff_factor": 2.0**-24}, "max_steps": 3,
}  # fmt: skip
"""The first step overflows, wherever; from then on the scale does."""
LION = {"optimizer": {"type": "lion", "learning_rate": 1e-3, "weight_decay": 0.1}}


def settings(store: Path, validation: Path, family: str, nodes: Sequence[int] = ONE, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a run of `family`; changes of `architecture` are of its keys."""
    # weights large enough for attention to matter
    architecture = {**COMMON, **ARCHITECTURES[family], "initializer_range": 0.2, **changes.pop("architecture", {})}
    return {
        **toy.parameters(store, validation, batch_size=ROWS[len(nodes)], micro_batch_size=2, max_steps=LAST),
        "architecture": architecture,
        "objective": OBJECTIVES.get(family, CAUSAL),
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.1},
        "max_grad_norm": 0.25,
        "checkpoint": {"save_steps": 1},
        "evaluation": {"steps": 1, "batches": 2},
        "events": {"optimizer_state": {}},
        **changes,
    }


@dataclass(frozen=True)
class Case:
    """A run of several processes.

    Attributes:
        both: settings that the run of one process has, too.
        own: settings that it does not have.
        exact: how far losses may be from those of one process, relative to them.
        close: how far each tensor may be, relative to its norm.
        started: whether runs start from a folder with a model of the family.
    """

    family: str
    parallel: Mapping[str, Any]
    both: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[int] = TWO
    exact: float = 5e-6
    close: float = 1e-5
    started: bool = False


def adapted(family: str, parallel: Mapping[str, Any], nodes: Sequence[int] = TWO, **own: Any) -> Case:
    """A case with adapters over a model in a folder."""
    return Case(family, parallel, {"lora": ADAPTERS[family]}, own, nodes, started=True)


class Runs:
    """The runs of a session.

    Attributes:
        said: what the processes have printed in the run of a folder.
    """

    def __init__(self, store: Path, validation: Path, base: Path) -> None:
        self.store, self.validation, self.base = store, validation, base
        self.made: dict[str, Path] = {}
        self.said: dict[Path, str] = {}
        self.worlds: dict[tuple[Any, ...], worlds.World] = {}

    def one(self, case: Case, source: Path | None = None) -> Path:
        """The run of one process that trains what `case` does."""
        return self.run(case.family, source=source, started=case.started, **case.both)

    def of(
        self,
        case: Case,
        source: Path | None = None,
        work: Callable[[worlds.Job, DistributedContext], None] = train,
        **changes: Any,
    ) -> Path:
        """The run of `case`, or what became of its checkpoint `source`."""
        given = {**case.both, **case.own, "parallel": dict(case.parallel), **changes}
        return self.run(case.family, case.nodes, source=source, work=work, started=case.started, **given)

    def run(
        self,
        family: str,
        nodes: Sequence[int] = ONE,
        *,
        source: Path | None = None,
        work: Callable[[worlds.Job, DistributedContext], None] = train,
        started: bool = False,
        **changes: Any,
    ) -> Path:
        """The folder of a run with these settings that goes on from the checkpoint `source`."""
        if started:
            changes["start_from"] = str(self.model(family))
        return self.train(settings(self.store, self.validation, family, nodes, **changes), nodes, source, work)

    def train(
        self,
        raw: dict[str, Any],
        nodes: Sequence[int] = ONE,
        source: Path | None = None,
        work: Callable[[worlds.Job, DistributedContext], None] = train,
    ) -> Path:
        """The folder of the run with the parameter JSON `raw`."""
        key = json.dumps([raw, nodes, str(source), work.__name__], sort_keys=True)
        if key not in self.made:
            out = self.base / os.urandom(4).hex()
            deepspeed = raw.get("parallel", {}).get("engine") == "deepspeed"
            if sum(nodes) == 1 and not deepspeed:
                here(out, raw, source)
            else:
                self._in_a_world(nodes, deepspeed, work, {"out": str(out), "settings": raw, "start_from": source})
            self.made[key] = out
        return self.made[key]

    def _in_a_world(self, nodes: Sequence[int], deepspeed: bool, work: Any, job: worlds.Job) -> None:
        of = (*nodes, deepspeed)
        if of not in self.worlds:
            self.worlds[of] = worlds.World(nodes, self.base, deepspeed=deepspeed)
        world = self.worlds.pop(of)  # one that fails is none
        before = [len(each.output.read_text()) if each.output.exists() else 0 for each in world.processes]
        world.run(work, job)
        printed = [each.output.read_text()[start:] for each, start in zip(world.processes, before, strict=True)]
        self.said[Path(job["out"])] = "\n".join(printed)
        self.worlds[of] = world

    def model(self, family: str) -> Path:
        """A folder with a model of `family` in plain Transformers."""
        folder = self.base / f"start.{family}"
        if not folder.exists():
            sizes = {**COMMON, **ARCHITECTURES[family]}
            kind, causal = sizes.pop("type"), family not in OBJECTIVES
            ids = {"vocab_size": 200, "bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
            config = AutoConfig.for_model(kind, **sizes, **ids, tie_word_embeddings=family != "llama")
            torch.manual_seed(5)
            made = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_config(config)
            spread(made, 1).save_pretrained(folder)
        return folder

    def close(self) -> None:
        """Ends all processes; the runs stay."""
        while self.worlds:
            self.worlds.popitem()[1].close()


def here(out: Path, parameters: dict[str, Any], source: Path | None = None) -> None:
    """Trains in this process."""
    if source is not None:
        shutil.copytree(source, out / "checkpoints" / source.name)
    train_in_this_process(
        Parameters.from_dict(parameters, source="test"), out, StartOptions(allow_change=frozenset({"parallel"}))
    )


def checkpoint(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step:08d}"


def last_step(out: Path) -> int:
    return max(toy.losses(out))


def state(out: Path, kind: str, step: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, of the last one without `step`."""
    return toy.saved(checkpoint(out, step or last_step(out)), kind)


def averages(out: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """The moving averages of a checkpoint, if it has some."""
    folder = checkpoint(out, step or last_step(out))
    return dict(SavedEventTensors(folder, "ema")) if "ema" in plugins_in(folder) else {}


def contents(out: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights, the optimizer's state, averages."""
    found = {kind: state(out, kind, step) for kind in ("model", "optimizer")} | {"ema": averages(out, step)}
    return {f"{kind}/{name}": value for kind, values in found.items() for name, value in values.items()}


def assert_close(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], tolerance: float) -> None:
    """Compares each tensor's error with its own norm. BERT's key biases do not change the softmax and their gradients
    are only rounding: their errors are compared with the norm of everything."""
    assert first.keys() == second.keys() and first
    every = torch.cat([value.double().flatten() for value in first.values()]).norm()
    for name, value in first.items():
        assert value.shape == second[name].shape, name
        error = (value.double() - second[name].double()).norm()
        norm = every if "key.bias" in name else value.double().norm().clamp(min=1e-6)
        assert error <= tolerance * norm, f"{name}: {error / norm:.1e}"


def assert_same_losses(first: Path, second: Path, tolerance: float) -> None:
    """Of the steps of the second run: losses and norms of gradients."""
    mine, theirs = toy.losses(first), toy.losses(second)
    assert max(theirs) == max(mine)
    for step in theirs:
        assert mine[step] == pytest.approx(theirs[step], rel=tolerance, abs=0.0), step


def assert_same_bits(first: Path, second: Path) -> None:
    assert_same_losses(first, second, 0.0)
    assert_close(contents(first), contents(second), 0.0)


def assert_norms_alike(first: Path, second: Path, tolerance: float) -> None:
    """The logged norms of the optimizer's state are those of the tensors in the second run's checkpoints, in float64,
    and those of the first run, by parameter group."""
    expected, got = (toy.records(out, "optimizer_state") for out in (first, second))
    for step in got.keys() & {1, last_step(second)}:
        found = {name: value for name, value in state(second, "optimizer", step).items() if not name.endswith("/step")}
        trained = {name.rpartition("/")[0] for name in found}
        weights = {name: value for name, value in state(second, "model", step).items() if name in trained}
        found |= {f"{name}/weight": value for name, value in weights.items()}
        for kind in {name.rpartition("/")[2] for name in found}:
            whole = torch.cat([value.double().flatten() for name, value in found.items() if name.endswith(f"/{kind}")])
            assert got[step][kind] == pytest.approx(float(whole.norm()), rel=1e-12), (step, kind)
        for name, value in got[step].items():
            if "/group" in name:
                assert value == pytest.approx(expected[step][name], rel=max(tolerance, 1e-6)), (step, name)
        groups = {name for name in got[step] if "/group" in name}
        assert groups == {name for name in expected[step] if "/group" in name} and len(groups) > 1, step


def assert_trained_alike(runs: Runs, case: Case) -> None:
    """`case` trains what one process trains: losses and norms, gradients, weights, the optimizer's state, averages, and
    what validation finds."""
    one, mine = runs.one(case), runs.of(case)
    assert_same_losses(one, mine, case.exact)
    for step in (1, last_step(one)):  # first moments of the first step are gradients, times a constant
        assert_close(contents(one, step), contents(mine, step), case.close)
    assert_norms_alike(one, mine, case.close)
    expected, got = (toy.records(out, "validation") for out in (one, mine))
    assert expected.keys() == got.keys()
    for step, values in expected.items():
        for name in {"loss", "masked_accuracy", "token_accuracy", "generator_accuracy"} & values.keys():
            assert got[step][name] == pytest.approx(values[name], rel=max(case.close, 1e-5)), (step, name)


def assert_resumed_alike(runs: Runs, case: Case) -> None:
    """`case` goes on from the checkpoint before the last one bit for bit."""
    straight = runs.of(case)
    before = last_step(straight) - 1
    resumed = runs.of(case, checkpoint(straight, before), **UNVALIDATED)
    assert before not in toy.losses(resumed)
    assert_same_bits(straight, resumed)


def assert_goes_on(runs: Runs, case: Case, other: Case | None) -> None:
    """`case` goes on from a checkpoint of `other`, of one process where that is None, as one process would."""
    one = runs.one(case)
    source = one if other is None else runs.of(other)
    before = last_step(source) - 1
    mine = runs.of(case, checkpoint(source, before), **UNVALIDATED)
    assert before not in toy.losses(mine)
    assert_same_losses(one, mine, 1e-5)
    assert_close(contents(one), contents(mine), 1e-5)


def assert_exported_alike(runs: Runs, case: Case, folder: Path) -> None:
    """The export is that of one process, with the bits of the trained weights and of the checkpoint's own model, and
    what plain Transformers loads has the logits of one process's model."""
    one, mine = (export(out, folder / name).out for name, out in (("one", runs.one(case)), ("mine", runs.of(case))))
    trained, last = state(runs.of(case), "model"), checkpoint(runs.of(case), last_step(runs.of(case)))
    ids = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    for config in mine.rglob("config.json"):
        role = config.parent.relative_to(mine)
        values = load_file(config.parent / "model.safetensors")
        assert_close(load_file(one / role / "model.safetensors"), values, case.close)
        assert_close(load_file(last / "model" / role / "model.safetensors"), values, 0.0)
        prefix = "model" if role == Path() else role.name
        own = {name.removeprefix(f"{prefix}."): value for name, value in trained.items() if name.startswith(prefix)}
        if not case.both.keys() & {"lora", "objective"}:  # with which weights are sums
            assert len(own) > 10 and all(torch.equal(values[name], value) for name, value in own.items())
        kind = getattr(transformers, json.loads(config.read_text())["architectures"][0])
        models = [kind.from_pretrained(out / role, local_files_only=True).eval() for out in (one, mine)]
        with torch.no_grad():
            logits = [model(ids).logits for model in models]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5 if case.close < 1e-4 else 1e-2)
    if "lora" in case.both:
        adapters = [load_file(out / "adapter/adapter_model.safetensors") for out in (one, mine, last)]
        assert_close(adapters[0], adapters[1], case.close)
        assert_close(adapters[1], adapters[2], 0.0)


def assert_overflows_alike(runs: Runs, case: Case) -> Path:
    """In fp16 one process and `case` skip the first step, and later steps fit into the lower scale. Returns the run."""
    case = replace(case, both={**case.both, **OVERFLOW, **UNVALIDATED})
    one, mine = runs.one(case), runs.of(case)
    for records in (toy.records(one), toy.records(mine)):
        assert [(each["loss_scale"], each["skipped_steps"]) for each in records.values()] == [(2.0**16, 1)] * 3
        assert records[1]["grad_norm"] is None
    for step, (loss, norm) in toy.losses(one).items():
        assert toy.losses(mine)[step] == (pytest.approx(loss, rel=1e-2), norm and pytest.approx(norm, rel=1e-2))
    assert {value.dtype for value in state(mine, "model").values()} == {torch.float32}
    assert_close(state(one, "model"), state(mine, "model"), 1e-2)
    return mine


def assert_lion_alike(runs: Runs, case: Case) -> None:
    """Lion's updates are signs: where a gradient is nearly zero, rounding may flip one."""
    case = replace(case, both={**case.both, **LION, **UNVALIDATED})
    one, mine = runs.one(case), runs.of(case)
    assert_same_losses(one, mine, 1e-4)
    expected, got = (state(out, "model") for out in (one, mine))
    learnt = [
        name for name in expected if not name.endswith("key.bias")
    ]  # whose gradient is 0, so its sign is rounding
    apart = sum(int(((expected[name] - got[name]).abs() > 1e-6).sum()) for name in learnt)
    assert apart <= sum(expected[name].numel() for name in learnt) / 1000
    assert state(one, "optimizer").keys() == state(mine, "optimizer").keys()
    assert_resumed_alike(runs, case)
