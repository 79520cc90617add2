"""Chunked cross entropy beside whole logits: peak memory and time of a step of `causal_lm`, by `head_positions`.

    python tools/bench/head.py [--hidden-size 256 --layers 4 --vocabulary 32768 --rows 8 --sequence-length 512]

Contestants take turns, a forward and a backward each; a ratio is that of the medians. Memory is the most that tensors
hold at once during a step beside weights and gradients: on a GPU the allocator's own number, on a processor the sum
over every tensor that torch makes, counted in a step of its own. Losses of all contestants are compared first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terakoya.components.vocabulary import Vocabulary
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention
from terakoya.training.engines.engine import autocast_forward

TOLERANCE = 1e-5


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it held at once."""

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        """What lies in memory `before` is not counted."""
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for each in before:
            storage = each.untyped_storage()
            self.known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._add(each.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        known = self.known.get(place)
        if known is not None and known() is not None:
            return

        def gone(_: Any) -> None:
            self.now -= size

        self.known[place] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def main() -> int:
    """Prints a table. Returns the exit status: 1 where losses differ."""
    arguments = _arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    vocabulary = Vocabulary(size=arguments.vocabulary, pad=0, eos=1, special=(0, 1))
    batch = make_batch(arguments, device)
    contestants = {None: "whole logits", **{each: f"{each:,} positions" for each in arguments.head_positions}}
    modules = {positions: make_module(arguments, vocabulary, positions, device) for positions in contestants}
    losses = {positions: step(module, batch, device)[0] for positions, module in modules.items()}
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'processor'}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), {arguments.precision}; {arguments.layers} layers of "
        f"{arguments.hidden_size}, vocabulary {arguments.vocabulary:,}, {arguments.rows} rows of "
        f"{arguments.sequence_length}"
    )
    times: dict[int | None, list[float]] = {positions: [] for positions in contestants}
    for _ in range(arguments.rounds):
        for positions, module in modules.items():
            times[positions].append(step(module, batch, device)[1])
    whole = statistics.median(times[None]), memory(modules[None], batch, device)
    print("| logits at once | ms a step | time | peak MB | memory |\n|---|---:|---:|---:|---:|")
    for positions, name in contestants.items():
        seconds, peak = statistics.median(times[positions]), memory(modules[positions], batch, device)
        slower, share = seconds / whole[0], peak / whole[1]
        print(f"| {name} | {1000 * seconds:.1f} | {slower:.2f} x | {peak / 1e6:.1f} | {share:.2f} x |")
    apart = max(abs(loss - losses[None]) / losses[None] for loss in losses.values())
    print(f"losses are {apart:.1e} apart")
    return int(apart > (TOLERANCE if arguments.precision == "fp32" else 1e-2))


def make_module(
    arguments: argparse.Namespace, vocabulary: Vocabulary, positions: int | None, device: torch.device
) -> torch.nn.Module:
    """A GPT-2 under `causal_lm`, the same weights whatever the `positions`."""
    architecture = registry().component("architectures", "gpt2")(
        hidden_size=arguments.hidden_size, num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 64, max_position_embeddings=arguments.sequence_length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    objective = registry().component("objectives", "causal_lm")(layout="stream", head_positions=positions)
    module: torch.nn.Module = objective.build(architecture, vocabulary).to(device).train()
    attention.use(module, "sdpa")
    autocast_forward(module, device, arguments.precision)
    return module


def make_batch(arguments: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens (B, T), each the label of the one before."""
    shape = arguments.rows, arguments.sequence_length
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, arguments.vocabulary, (shape[0], shape[1] + 1), generator=generator)
    places = torch.arange(shape[1]).expand(shape)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": places}
    batch |= {"document_ids": torch.zeros(shape, dtype=torch.int64), attention.WHOLE_ROWS: torch.empty(0)}
    return {name: value.to(device) for name, value in batch.items()}


def step(module: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> tuple[float, float]:
    """The mean loss of a forward and a backward, and their seconds: on a processor those of its own time."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    loss = module(batch)["lm_loss"] / batch["labels"].numel()
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return float(loss.detach()), clock() - start


def memory(module: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> int:
    """The most bytes that a step holds beside what it begins with; gradients are there already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(module, batch, device)
        return torch.cuda.max_memory_allocated() - before
    before = [*batch.values(), *(each for weight in module.parameters() for each in (weight, weight.grad))]
    with Peak(each for each in before if each is not None) as peak:
        step(module, batch, device)
    return peak.peak


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--head-positions", type=int, nargs="*", default=[1024, 256])
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
