"""What torch's compiler would read and write for a GPU, without one: the kernels that it plans for a block of a model,
forward and backward, whose code is not written.

Everything up to the plan is the compiler's own: tracing, the cut between forward and backward, and fusion. The block's
tensors are fake_cuda's. Bytes are counted as there: a kernel reads each input and writes each output once.

`python tests/helpers/fake_compiler.py` prints the figures of docs/design/bf16-stream.md: a step of BERT-base, 32 rows
of 512, and blocks of other families, 16 rows of 512 (about three minutes of one core).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_cuda
import fake_cuda_cases
import fake_cuda_worker
import torch
import torch._functorch.config as functorch_options
import torch._inductor.config as compiler_options
import toy
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import ir, scheduler
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from terakoya.components import ModuleBuild
from terakoya.training.model import compilation
from terakoya_precision.fused import choice

H100 = SimpleNamespace(
    name="fake", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, gcnArchName="",
)  # fmt: skip
"""What the compiler asks of a device: how many parts it splits a sum into depends on it."""
PRODUCTS, ATTENTION, GELU, NORMS, BIASES = "products", "attention", "GELU", "norms, dropout, sums", "biases"
"""What a kernel is for. `BIASES` are all sums over positions, of which those of norms' weights are a hundredth."""

OURS = ("add_product", "add_float_product")
"""Parts of the names of products that add to what is there."""
OPERATIONS = {
    "mm": PRODUCTS,
    **dict.fromkeys(OURS, PRODUCTS),
    "attn": ATTENTION,
    "gelu": GELU,
    "join": BIASES,
    "column_sums": BIASES,
}
"""What an operation is for that the compiler calls and does not write, by a part of its name; others are of NORMS."""


class _Planned(Exception):
    """Forward and backward are planned; there is nothing to run."""


class Plan:
    """Kernels of a block, forward and backward.

    Attributes:
        bytes, kernels: by what they are for.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def add(self, graph: GraphLowering) -> SimpleNamespace:
        """Counts the kernels of `graph`, in place of writing them."""
        graph.init_wrapper_code()
        graph._update_scheduler()
        with V.set_graph_handler(graph):
            for node in graph.scheduler.nodes:
                if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
                    continue
                kind = purpose(node)
                self.kernels[kind] += 1 + (kind == PRODUCTS and copies_summand(node.node))
                plain = kind != PRODUCTS or any(each in operation(node) for each in OURS)
                self.bytes[kind] += node.get_read_write_buffers_sizes() if plain else product_bytes(node.node)
        return SimpleNamespace(call=_stop, runner=None)


def _stop(*_: Any) -> None:
    raise _Planned


def purpose(node: scheduler.BaseSchedulerNode) -> str:
    """What the kernel of `node` is for."""
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        return next((kind for part, kind in OPERATIONS.items() if part in operation(node)), NORMS)
    parts = [part for part in node.get_nodes() if part.node is not None]
    targets = {str(origin.target) for part in parts for origin in part.node.origins}  # type: ignore[union-attr]
    if all(part.is_reduction() for part in parts) and not any("var_mean" in target for target in targets):
        return BIASES
    return GELU if not any(part.is_reduction() for part in parts) and "aten.erf.default" in targets else NORMS


def operation(node: scheduler.BaseSchedulerNode) -> str:
    """The name of the operation that `node` calls; empty where the compiler writes it."""
    return str(getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", ""))


def product_bytes(kernel: Any) -> int:
    """The bytes of the operands and the result of a product, and of a copy of what `addmm` adds to."""
    *operands, result = map(_size, [*kernel.inputs, kernel])
    return sum(operands) + result + 2 * result * copies_summand(kernel)


def copies_summand(kernel: Any) -> bool:
    """Whether `kernel` is an `addmm` that copies what it adds to into its result: a matrix, and no bias."""
    return "addmm" in str(kernel.op_overload) and _size(kernel.inputs[0]) == _size(kernel)


def _size(values: Any) -> int:
    """The bytes of `values`, of which the compiler knows the shape: once where they are expanded."""
    pairs = zip(values.get_size(), values.get_stride(), strict=True)
    return math.prod(int(size) for size, stride in pairs if stride != 0) * values.get_dtype().itemsize


@contextlib.contextmanager
def planner(plan: Plan) -> Iterator[None]:
    """While open, torch's compiler finds an H100, and adds what it would write for it to `plan`."""
    joint, late = joint_graph.lazy_init, post_grad.lazy_init
    cuda = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_properties": lambda *_: H100, "get_device_capability": lambda *_: (H100.major, H100.minor),
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: None, "device": lambda *_: contextlib.nullcontext(),
    }  # fmt: skip
    patches: list[tuple[Any, str, Any]] = [(torch.cuda, name, answer) for name, answer in cuda.items()]
    patches += [
        (torch.accelerator, "is_available", lambda: False),  # its streams
        (CudaInterface, "get_device_properties", staticmethod(lambda *_: H100)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H100)),
        (scheduler, "has_triton", lambda: True),
        # patterns of graphs, the same for every device, are traced with tensors of one
        (joint_graph, "lazy_init", lambda *_: joint(torch.device("cpu"))),
        (post_grad, "lazy_init", lambda *_: late(torch.device("cpu"))),
        (GraphLowering, "compile_to_module", lambda graph: plan.add(graph)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in patches:
            stack.enter_context(mock.patch.object(owner, name, answer))
        # constants are folded by computing them on the device; fusion puts them into the kernels anyway
        options = {"fx_graph_cache": False, "compile_threads": 1, "joint_graph_constant_folding": False}
        stack.enter_context(compiler_options.patch(options))
        stack.enter_context(functorch_options.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        yield


def plan_block(parameters: dict[str, Any], out: Path, vocabulary: int | None) -> tuple[Plan, dict[str, Any]]:
    """Takes a step without compilation, and plans the first block with what it got in that step.

    Returns:
        plan: of the block.
        step: what the worker saw.
    """
    found: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], bool]] = []

    def compile_module(module: nn.Module, build: ModuleBuild) -> None:
        block = next(compilation.blocks(module, build.architectures, build.vocabulary))

        def hook(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            handle.remove()
            found.append((block, given, named, torch.is_autocast_enabled("cuda")))

        handle = block.register_forward_pre_hook(hook, with_kwargs=True)

    @contextlib.contextmanager
    def uncompiled(_: Any) -> Iterator[dict[str, Any]]:
        with (
            mock.patch.object(compilation, "compile_module", compile_module),
            mock.patch.object(compilation, "missing_tools", lambda _: "none"),
            mock.patch.object(choice, "reason_against", lambda *_: None),
        ):
            yield {}

    with mock.patch.object(fake_cuda_worker, "uncompiled", uncompiled):
        adamw = {"adamw": fake_cuda_cases.OPTIMIZERS["adamw"]}
        case = {"parameters": parameters, "optimizers": adamw, "vocabulary": vocabulary}
        step = fake_cuda_worker.take_step("step", case, out)
    block, given, named, autocast = found[0]
    inputs = [each.detach().requires_grad_() if isinstance(each, Tensor) else each for each in given]
    fake_mode = next(each for each in given if isinstance(each, fake_cuda.FakeTensor)).fake_mode
    plan = Plan()
    torch._dynamo.reset()
    with planner(plan), fake_mode, torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        block.compile(backend=compilation.BACKEND, fullgraph=True, dynamic=False)
        with contextlib.suppress(_Planned):
            block(*inputs, **named)
    return plan, step


def take(cases: Mapping[str, Any], guard: Path, out: Path) -> dict[str, Any]:
    """Plans and steps by name, of a process of its own."""
    environment = {**os.environ, "LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(out), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def base(folder: Path) -> dict[str, Any]:
    """Plans of BERT-base's block, and steps with 12 layers and with 1: of the stream, and under autocast."""
    store = toy.make_store(folder / "store", documents=900, seed=1)
    cases = {
        f"{name} {layers}": {
            "parameters": fake_cuda_cases.bert(
                store, layers=layers, width=768, length=512, autocast=name == "autocast"
            ),
            "vocabulary": 32768,
        }
        for name in ("stream", "autocast")
        for layers in (1, 12)
    }
    return take(cases, fake_cuda.compile_guard(folder), folder / "run")


def table(seen: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, int]]]:
    """GB and kernels of a step of BERT-base by part, with and without compiled blocks."""
    found = {}
    for name in ("stream", "autocast"):
        one, twelve = (seen[f"{name} {layers}"] for layers in (1, 12))
        update = twelve["updates"]["adamw"]
        for compiled in (False, True):
            column: dict[str, tuple[float, int]] = {}
            parts = {f"blocks: {kind}": key for kind, key in one["plan"].items()} if compiled else {}
            for key in ("bytes", "kernels"):
                unit = 1e9 if key == "bytes" else 1
                a_block = (twelve[key] - one[key]) / 11
                rows = {part: 12 * each[key] for part, each in parts.items()}
                rows["blocks"] = sum(rows.values()) if compiled else 12 * a_block
                rows["outside of blocks"] = one[key] - a_block
                rows["micro-step"] = rows["blocks"] + rows["outside of blocks"]
                rows["update"] = update[key]
                rows["step"] = rows["micro-step"] + rows["update"]
                for row, value in rows.items():
                    column[row] = (*column.get(row, ()), value / unit)  # type: ignore[assignment]
            found[f"{name}, {'compiled' if compiled else 'uncompiled'}"] = column
    return found


def families(folder: Path, names: Sequence[str]) -> dict[str, dict[str, tuple[float, int]]]:
    """GB and kernels of a block of `names`, forward and backward, with and without the compiler; of T5 a block of the
    encoder, and uncompiled one of each."""
    store = toy.make_store(folder / "store", documents=50, seed=1)
    cases = {
        f"{name}, {way}, {layers}": fake_cuda_cases.wide(store, name, layers=layers, autocast=way == "autocast")
        for name in names
        for way in ("autocast", "stream")
        for layers in (1, 2)
    }
    seen, found = take(cases, fake_cuda.compile_guard(folder), folder / "run"), {}
    for name in names:
        for way in ("autocast", "stream"):
            one, two = (seen[f"{name}, {way}, {layers}"] for layers in (1, 2))
            plan = one["plan"].values()
            found[f"{name}, {way}"] = {
                "uncompiled": ((two["bytes"] - one["bytes"]) / 1e9, two["kernels"] - one["kernels"]),
                "compiled": (sum(each["bytes"] for each in plan) / 1e9, sum(each["kernels"] for each in plan)),
            }
    return found


def main() -> None:
    """Plans the cases of the arguments and prints them as JSON; without arguments, prints the table."""
    if len(sys.argv) > 1:
        seen = {}
        with contextlib.redirect_stdout(sys.stderr):
            for name, case in json.loads(sys.argv[2]).items():
                plan, step = plan_block(case["parameters"], Path(sys.argv[1]), case["vocabulary"])
                kinds = {kind: {"bytes": plan.bytes[kind], "kernels": plan.kernels[kind]} for kind in plan.bytes}
                seen[name] = {**step, "plan": kinds}
        sys.stdout.write(json.dumps(seen))
        return
    with tempfile.TemporaryDirectory() as folder:
        blocks = families(Path(folder) / "families", list(fake_cuda_cases.FAMILIES))
        for name, column in {**table(base(Path(folder))), **blocks}.items():
            for part, (gigabytes, kernels) in column.items():
                sys.stdout.write(f"{name:22} {part:32} {gigabytes:6.2f} GB {kernels:6.0f} kernels\n")


if __name__ == "__main__":
    main()
