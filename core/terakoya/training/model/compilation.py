"""torch.compile over the blocks of each model, or over the whole root module (Ansel et al., 2024, ASPLOS).

A compiled block is the same module with the same weights: only its `forward` is replaced, so names, checkpoints and
exports do not change. Graphs are traced whole (`fullgraph`): what cannot be traced is an error that
names the line, and never a slower step. Shapes are static. What would change them is handled elsewhere: short
micro-batches are filled up with rows of padding, and the two sizes that depend on documents are marked as dynamic
(`training/batches.py`).

See docs/design/compile.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from terakoya.components import Architecture, ModuleBuild
from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.conflicts import auto_graph_obstacle, compile_obstacle
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.process_pool import available_cores
from terakoya.toolkit.gpu_compiler import missing_tools
from terakoya.training.model.module_parts import architecture_of, top_level_models

Mode = Literal["off", "blocks", "whole"]

BACKEND = "inductor"
"""torch's name of the compiler."""
TRACE_ONLY = "eager"
"""torch's name of a compiler that traces graphs and runs them as they are."""
GRAPH_OPTIONS = {"triton.cudagraphs": True, "triton.cudagraph_or_error": True, "graph_partition": False}
"""The compiler's options for CUDA graphs: one for each forward and backward, or an error that names what it cannot
record, and never the same kernels started one by one without a word."""
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""The variable in which torch's compiler finds how many workers it may start."""
RECOMPILE_LIMIT = 64
"""Graphs of one block's code: kinds of layers times training and evaluation times shapes."""


@dataclass(frozen=True)
class Choice:
    """What runs compiled.

    Attributes:
        mode: what of the module.
        cuda_graphs: whether that is recorded as CUDA graphs.
        note: why it is not what "auto" takes for another run or machine, for the log; None where it is.
    """

    mode: Mode
    cuda_graphs: bool = False
    note: str | None = None


def choose(parameters: Parameters, device: torch.device, *, processes: int = 1) -> Choice:
    """Returns what a run of so many `processes` compiles on `device`. Raises UserError if `cuda_graphs` is true and the
    device cannot record them."""
    if parameters.cuda_graphs is True:
        lacks = missing_tools(device) if device.type == "cuda" else f"this run is on the {device.type}"
        if lacks:
            raise UserError(f'cuda_graphs: needs a GPU and a compiler for it, and {lacks}; use "cuda_graphs": "auto"')
        return Choice("whole", cuda_graphs=True)
    if device.type != "cuda":
        return Choice("off" if parameters.compile == "auto" else parameters.compile)
    if parameters.cuda_graphs is False:
        return without_graphs(parameters, device)
    obstacle = auto_graph_obstacle(parameters, processes) or missing_tools(device)
    if obstacle is None:
        return Choice("whole", cuda_graphs=True)
    choice = without_graphs(parameters, device)
    is_enough = choice.mode == "off"  # what is not compiled is not recorded
    return choice if is_enough else replace(choice, note=f"CUDA graphs off: {obstacle}")


def without_graphs(parameters: Parameters, device: torch.device) -> Choice:
    """Returns what a run on the GPU `device` compiles where nothing is recorded."""
    if parameters.compile != "auto":
        return Choice(parameters.compile)
    obstacle = compile_obstacle(parameters, "blocks") or missing_tools(device)
    return Choice("off", note=f"compile off: {obstacle}") if obstacle else Choice("blocks")


def compile_module(module: nn.Module, build: ModuleBuild) -> None:
    """Makes the blocks of every model in `module`, or `module` itself, run compiled, in place, as `build` says. A stage
    of a pipeline is a copy of its blocks, so this comes after the engine."""
    if build.compiled == "off":
        return
    topology = build.context.topology
    processes_here = topology.processes_per_node()[topology.processes[build.context.rank].node_rank]
    if THREADS not in os.environ and processes_here > 1:
        import torch._inductor.config as inductor

        # the compiler would start as many workers as if this process were alone here
        threads = available_cores() // processes_here
        inductor.compile_threads = max(1, min(inductor.compile_threads or 1, threads))
    parts = [module] if build.compiled == "whole" else blocks(module, build.architectures, build.vocabulary)
    compile_parts(parts, build.parameters.objective.row_layout(), cuda_graphs=build.cuda_graphs)


def compile_parts(
    parts: Iterable[nn.Module], layout: Layout, *, cuda_graphs: bool = False, backend: str | None = None
) -> None:
    """Makes each of `parts` run compiled, in place. Its first call compiles it, with what an engine has changed inside;
    what hooks on it do, such as gathering its weights, remains outside.

    Args:
        layout: the rows' layout.
        cuda_graphs: whether what is compiled is recorded and replayed, see docs/design/cuda-graphs.md.
        backend: torch's name of the compiler; None is BACKEND.
    """
    import torch._dynamo.config as options

    options.recompile_limit = RECOMPILE_LIMIT
    # DDP reduces gradients block by block already; its own cuts through graphs exclude activation checkpointing
    options.optimize_ddp = False
    # of varying width: the second width makes a graph for all widths
    dynamic = None if layout.varies_in_width else False
    given: dict[str, Any] = {"backend": backend or BACKEND, "fullgraph": True, "dynamic": dynamic}
    if cuda_graphs:
        given["options"] = GRAPH_OPTIONS
    call = torch.compile(_call, **given)
    for part in parts:
        part.forward = functools.partial(call, part.forward)


def uncompile(module: nn.Module) -> None:
    """Undoes `compile_module` where it was called for a whole `module`, and frees what was compiled and recorded."""
    module.forward = module.forward.args[0]  # type: ignore[attr-defined]
    torch.compiler.reset()


def _call(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Returns what `forward` returns; the compiler would pass over a forward of torch that no other function calls."""
    return forward(*arguments, **named)


def blocks(module: nn.Module, architectures: Sequence[Architecture], vocabulary: Vocabulary) -> Iterator[nn.Module]:
    """Yields the blocks of every model in `module`."""
    for model in top_level_models(module):
        yield from architecture_of(model, architectures, vocabulary, key="compile").blocks(model)


def run_uncompiled(compiled: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which modules run as they are, where they are `compiled`: for shapes that training does not
    have."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


@contextlib.contextmanager
def explain_compile_errors() -> Iterator[None]:
    """While open, turns the compiler's errors into a UserError that says what to do: a part of the model could not be
    compiled."""
    try:
        yield
    except RuntimeError as error:
        if not is_compile_error(error):
            raise
        raise UserError(
            f'compile: {describe(error)}. Set "compile": "off", or rewrite this part of the model with operations of '
            "torch alone"
        ) from error


def is_compile_error(error: RuntimeError) -> bool:
    """Whether torch's compiler raised `error`."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def describe(error: Exception) -> str:
    """Returns what the compiler's `error` says, in a line: what cannot be compiled, and where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inside = ("/torch/", "/terakoya/training/")
    places = [line for line in lines if line.startswith("File ") and not any(each in line for each in inside)]
    said = lines[: 2 if lines and lines[0].endswith("raised:") else 1]  # "backend='inductor' raised:" and what
    return f"{' '.join(said) or type(error).__name__}{f', {places[-1]}' if places else ''}"
