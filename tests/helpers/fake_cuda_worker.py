"""Takes training steps on fake_cuda's machine: `fake_cuda_worker.py OUT [roads]` reads `{"NAME": CASE}` and prints what
it saw, both as JSON; with `roads` it goes those of `fake_cuda_roads`, too.

A case has `parameters`; `optimizers` by name, of which each takes an update with the same gradients; and may ask for a
`dry_run` before the step, for a `vocabulary` of so many ids, for an `.item()` in every module (`item_in_modules`),
for a `compiler`, and for the cost of a step of more `micro_steps` than are taken, as many of the last one. Nothing is
compiled; where a compiler would record CUDA graphs, all else happens as for a recording, which `fails` with that error
where the case says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fake_cuda
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from terakoya.components import ModuleBuild
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.plugins.create import create_component
from terakoya.rows.stores import Stores
from terakoya.toolkit.objectives.cross_entropy import summed_cross_entropy_, summed_cross_entropy_and_z_
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.model import compilation
from terakoya.training.run_log import RunLog
from terakoya.training.setup import build_trainer
from terakoya_planning.dry_run import dry_run
from terakoya_precision.fused import choice


class Updates:
    """Takes an engine's place in `step`: updates with several optimizers, twice each, since the first update makes
    their state.

    Attributes:
        seen: what the second update of each did, by name, and where either waited.
    """

    def __init__(self, engine: DDPEngine, machine: fake_cuda.Work, optimizers: Mapping[str, Mapping[str, Any]]) -> None:
        self.engine, self.machine, self.optimizers = engine, machine, optimizers
        self.step = engine.step
        self.seen: dict[str, dict[str, Any]] = {}
        self.forward: dict[str, Any] = {}

    def __call__(self, learning_rate: float, *, skip_above: float = math.inf) -> Tensor:
        """Returns the norm of gradients, like an engine, and clears gradients at the end."""
        engine, machine = self.engine, self.machine
        self.forward = summary(machine)
        clear, engine.clear_gradients = engine.clear_gradients, lambda: None  # type: ignore[method-assign]
        for name, settings in self.optimizers.items():
            optimizer = create_component("optimizers", settings["type"], settings["values"], where=name)
            engine.optimizer = optimizer.build(engine.module, fused=True)
            engine.skips_steps = bool(getattr(engine.optimizer, "_step_supports_amp_scaling", False))
            machine.clear()
            self.step(learning_rate, skip_above=skip_above)
            first = machine.places
            machine.clear()
            norm = self.step(learning_rate, skip_above=skip_above)
            seen = summary(machine)
            self.seen[name] = {**seen, "waits": first + seen["waits"]}
        engine.clear_gradients = clear  # type: ignore[method-assign]
        machine.clear()
        engine.clear_gradients()
        return norm


def summary(machine: fake_cuda.Work) -> dict[str, Any]:
    """What the machine did since it was last cleared."""
    return {"waits": list(machine.places), "kernels": machine.kernels, "bytes": machine.bytes}


def take_step(name: str, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """A step that is not logged."""
    parameters = Parameters.from_dict(case["parameters"], source=name)
    with fake_cuda.machine() as machine, uncompiled(case) as asked:
        if case.get("dry_run"):
            dry_run(parameters.model_copy(update={"max_steps": 1}), out)  # which times no further steps then
        context = connect(LaunchInfo.from_environment())
        run_log = RunLog(out, (), {}, active=False)
        said: list[str] = []
        run_log.print = said.append  # type: ignore[method-assign,assignment]
        stores = Stores.open(parameters.data)
        if case.get("vocabulary"):
            sentinels = tuple(range(case["vocabulary"] - 100, case["vocabulary"]))
            special = (*stores.vocabulary.special, *sentinels)
            update = {"size": case["vocabulary"], "special": special, "sentinels": sentinels}
            stores = replace(stores, vocabulary=stores.vocabulary.model_copy(update=update))
        trainer = build_trainer(parameters, out, stores, context, run_log)
        engine = trainer.engine
        assert isinstance(engine, DDPEngine)
        if case.get("item_in_modules"):
            read_in_every_module(engine.module)
        updates = engine.step = Updates(engine, machine, case["optimizers"])  # type: ignore[method-assign,assignment]
        trainer.run.step = 1  # the first step is logged
        start, stop = trainer.plan.rows(1)
        assert stop - start == trainer.phase.span.rows_per_step, f"{name}: ends before the step that is counted"
        unrecordable, last = watch_micro_steps(engine, machine)
        machine.clear()
        asked["marks"] = 0
        trainer.one_step()
        assert updates.forward["kernels"] > 0
        rest = summary(machine)
        more = max(0, case.get("micro_steps", 0) - trainer.phase.rank_batch.micro_steps)
        return {
            "device": str(context.device),
            "flash": trainer.batches.flash,
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "unrecordable": unrecordable,
            "micro_steps": trainer.phase.rank_batch.micro_steps,
            **asked,
            "said": [line for line in said if "CUDA graphs off" in line or "compile off" in line],
            "recorded": trainer.facts["world"]["cuda_graphs"],
            "waits": updates.forward["waits"] + rest["waits"],
            **{key: updates.forward[key] + rest[key] + more * last[key] for key in ("kernels", "bytes")},
            "updates": updates.seen,
        }


@contextlib.contextmanager
def uncompiled(case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """While open, the run of a `case` compiles nothing; yields what was to be, and what CUDA graphs were told."""
    asked: dict[str, Any] = {"compile": [], "marks": 0}

    def compile_module(module: nn.Module, build: ModuleBuild) -> None:
        asked["compile"].append([build.compiled, build.cuda_graphs])
        if build.cuda_graphs:
            module.forward = partial(record, module.forward)

    def record(forward: Callable[..., Any], *arguments: Any) -> Any:
        if case.get("fails"):
            raise (torch.OutOfMemoryError if case["fails"] == "memory" else RuntimeError)(case["fails"])
        return forward(*arguments)

    def mark() -> None:
        asked["marks"] += 1

    with (
        mock.patch.object(compilation, "compile_module", compile_module),
        mock.patch.object(compilation, "missing_tools", lambda device: None if case.get("compiler") else "none"),
        mock.patch.object(torch.compiler, "reset", lambda: None),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", mark),
        mock.patch.object(choice, "reason_against", lambda *_: None),
    ):
        yield asked


def watch_micro_steps(engine: DDPEngine, machine: fake_cuda.Work) -> tuple[list[str], dict[str, int]]:
    """Returns a list that gets what forward and backward do that a CUDA graph cannot record, and what gets the kernels
    and bytes of the last micro-step."""
    found: list[str] = []
    last: dict[str, int] = {}
    micro_step = engine.micro_step

    def watched(*arguments: Any, **named: Any) -> Any:
        machine.unrecordable.clear()
        before = machine.kernels, machine.bytes
        sums = micro_step(*arguments, **named)
        last.update(kernels=machine.kernels - before[0], bytes=machine.bytes - before[1])
        found.extend(machine.unrecordable)
        return sums

    engine.micro_step = watched  # type: ignore[method-assign]
    return found, last


def read_in_every_module(module: nn.Module) -> None:
    """Puts an `.item()` into the forward of the modules that have parameters of their own."""

    def read(part: nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            result.sum().item()

    for part in module.modules():
        if part._parameters:
            part.register_forward_hook(read)


def probe() -> dict[str, list[str]]:
    """What the machine records of each way to wait, and of some that do not, by name."""
    found: dict[str, list[str]] = {}
    with fake_cuda.machine() as machine:
        values = torch.empty(4, 4, device="cuda")
        ids = torch.empty(4, dtype=torch.int64, device="cuda")
        truths = values > 0
        ways: dict[str, Callable[[], Any]] = {
            "item": lambda: values.sum().item(),
            "if": lambda: bool(values.sum() > 0),
            "float": lambda: float(values.sum()),
            "cpu": lambda: values.cpu(),
            "tolist": lambda: values.sum().tolist(),
            "nonzero": lambda: truths.nonzero(),
            "where of one argument": lambda: torch.where(truths),
            "masked_select": lambda: values.masked_select(truths),
            "boolean index": lambda: values[truths],
            "boolean index of rows": lambda: values[truths[0]],
            "assignment to a boolean index": lambda: values.index_put_((truths,), values[0, 0]),
            "unique": lambda: ids.unique(),
            "bincount": lambda: ids.bincount(),
            "repeats on the device": lambda: values.repeat_interleave(ids, 0),
            "equal": lambda: torch.equal(values, values),
            "allclose": lambda: torch.allclose(values, values),
            "a number copied there": lambda: torch.tensor(1.0).to("cuda"),
            "an array copied there": lambda: torch.ones(3).to("cuda"),
            "copy_ from the host": lambda: values.copy_(torch.ones(4, 4)),
            "a tensor of the host beside it": lambda: values + torch.ones(4, 4),
            "where": lambda: torch.where(truths, values, 0.0),
            "masked_fill": lambda: values.masked_fill(truths, 0.0),
            "index of ids": lambda: values[ids],
            "a copy without waiting": lambda: torch.ones(3).to("cuda", non_blocking=True),
            "known repeats": lambda: values.repeat_interleave(2, 0),
        }
        for name, way in ways.items():
            machine.clear()
            try:
                way()
            except (AssertionError, RuntimeError) as error:
                machine.places.append(f"{type(error).__name__}: {str(error)[:80]}")
            found[name] = list(machine.places)
    return found


def refusals() -> dict[str, list[str | None]]:
    """Whether the machine takes operands of one dtype, bf16, and what it says to float32 among them, by operation."""
    found: dict[str, list[str | None]] = {}
    with fake_cuda.machine():
        low = torch.empty(2, 16, 8, dtype=torch.bfloat16, device="cuda")
        bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device="cuda")
        functional = nn.functional
        ways: dict[str, Callable[[Tensor, Tensor], Any]] = {
            "product": lambda one, other: one[0] @ other[0].t(),
            "product with a bias": lambda one, other: functional.linear(one, one[0, :8], other[0, 0]),
            "products of stacks": lambda one, other: one @ other.transpose(1, 2),
            "norm": lambda one, other: functional.layer_norm(one, (8,), other[0, 0], other[0, 1]),
            "attention": lambda one, other: functional.scaled_dot_product_attention(one[None], one[None], other[None]),
            "attention with a bias": lambda one, other: functional.scaled_dot_product_attention(
                one[None], one[None], one[None], attn_mask=other[None, :, :, :1].expand(1, 2, 16, 16)
            ),
            "flash": lambda one, other: varlen_attn(
                *(each.transpose(0, 1) for each in (one, one, other)), bounds, bounds, 8, 8
            ),
            "assignment": lambda one, other: one.index_put_((bounds.long(),), other[:1]),
            "interpolation": lambda one, other: one.lerp(other, 0.5),
        }
        for name, way in ways.items():
            found[name] = []
            for other in (low, low.float()):
                try:
                    way(low, other)
                    found[name].append(None)
                except RuntimeError as error:
                    found[name].append(str(error))
    return found


def bytes_a_logit() -> dict[str, float]:
    """What the loss reads and writes a logit, forward and backward, for logits in bf16, in float32, and converted."""
    found = {}
    with fake_cuda.machine() as machine:
        labels = torch.empty(512, dtype=torch.int64, device="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            leaf = torch.empty(512, 4096, dtype=dtype, device="cuda", requires_grad=True)
            for name, summed in (("loss", summed_cross_entropy_), ("loss and z", summed_cross_entropy_and_z_)):
                machine.clear()
                sums = summed(leaf * 1, labels)
                torch.autograd.grad(sums if isinstance(sums, Tensor) else sums[0] + sums[1], leaf)
                product = 4 * leaf.element_size()  # `leaf * 1` reads and writes, forward and backward
                found[f"{name}, {dtype}"] = machine.bytes / leaf.numel() - product
        leaf = torch.empty(512, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        by_torch = partial(nn.functional.cross_entropy, reduction="sum")
        for name, function in (("converted", summed_cross_entropy_), ("converted, torch's", by_torch)):
            machine.clear()
            torch.autograd.grad(function((leaf * 1).float(), labels), leaf)
            found[name] = machine.bytes / leaf.numel() - 8
    return found


def bytes_an_element() -> dict[str, float]:
    """What operations read and write for each element of their first argument, by name."""
    found = {}
    with fake_cuda.machine() as machine:
        low = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
        wide, other = torch.empty(64, 64, device="cuda"), torch.empty(64, 64, device="cuda")
        rows = [torch.empty(64, 64, device="cuda") for _ in range(4)]
        parameter = nn.Parameter(wide)
        parameter.grad = other
        update = torch.optim.AdamW([parameter], fused=True)
        ways: dict[str, Callable[[], Any]] = {
            "copy_": lambda: low.copy_(wide),
            "_foreach_copy_": lambda: torch._foreach_copy_([low], [wide]),
            "bernoulli_": lambda: low.bernoulli_(0.5),
            "zeros_like": lambda: torch.zeros_like(wide),
            "add_": lambda: wide.add_(other),
            "addmm_": lambda: rows[0].addmm_(rows[1], rows[2]),
            "addmm": lambda: torch.addmm(rows[0], rows[1], rows[2]),
            "AdamW": update.step,
        }
        with torch.no_grad():
            update.step()  # makes the momenta
            for name, way in ways.items():
                machine.clear()
                way()
                found[name] = machine.bytes / wide.numel()
    return found


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        seen = {name: take_step(name, case, Path(sys.argv[1])) for name, case in cases.items()}
        seen |= {
            "ways": probe(), "bytes a logit": bytes_a_logit(), "bytes an element": bytes_an_element(),
            "refusals": refusals(),
        }  # fmt: skip
        if len(sys.argv) > 2:
            import fake_cuda_roads

            seen["roads"] = fake_cuda_roads.go(Path(sys.argv[1], sys.argv[2]))
    sys.stdout.write(json.dumps(seen))
