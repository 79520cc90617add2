"""The fused kernels in Triton's interpreter, on a CPU, beside float64: `interpreted_kernels.py '{"rows": [7], ...}'`
prints what was seen, as JSON. It is a process of its own, since Triton must be told to interpret before its import.

The argument has lists of `rows`, `widths` and `dtypes`; of `models` and ways to run `blocks` it takes those named, and
the self-check and StableAdamW where `check` is true.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from exact_models import Given, errors, replace_dropouts, rounded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ElectraConfig,
    ElectraModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from terakoya_memory.activation_checkpointing import checkpoint_block
from terakoya_plugins.optimizers.stable_adamw import StableAdamW, clipped, grouped, kernels
from terakoya_precision.bf16_stream import WeightCopies, fused_widths
from terakoya_precision.fused import ops, self_check

SIZES = {
    "vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "roberta": lambda: RobertaModel(RobertaConfig(**{**SIZES, "hidden_act": "gelu_new"})),
    "electra": lambda: ElectraModel(ElectraConfig(**SIZES, embedding_size=32)),
    "deberta_v2": lambda: DebertaV2Model(DebertaV2Config(**SIZES)),
    "silu": lambda: BertModel(BertConfig(**{**SIZES, "hidden_act": "silu"})),
}


def take(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the process saw."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a share of that of `expected`."""
    return float((got.detach().double() - expected.detach()).norm() / expected.detach().norm())


def kept_by(seed: Tensor | None, rows: int, width: int, dropout: float) -> Tensor:
    """What dropout with `seed` keeps of `rows` and `width`: 0 or 1, float64."""
    ones = torch.ones(rows, width)
    if seed is None:
        return ones.double()
    sums = ops.sum_norm(ones, torch.zeros(rows, width), ones[0], ones[0], seed, dropout, 1e-5)[1]
    return (sums != 0).double()


def of_sum_norm(rows: int, width: int, dtype: torch.dtype, dropout: float) -> dict[str, Any]:
    """Errors of results and gradients by name, the share of what was kept, and whether the backward drops the same and
    returns the same bits twice."""
    states, residual, gradient = (torch.randn(rows, width).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
    seed = ops.draw_seed(states.device) if dropout else None
    normed, total, *facts = ops.sum_norm(states, residual, weight, bias, seed, dropout, 1e-5)
    given = (gradient, total, *facts, weight, seed, dropout)
    of_total, of_states, parts = ops.sum_norm_backward(*given)
    again = ops.sum_norm_backward(*given)
    of_states = of_states if dropout else of_total
    kept = kept_by(seed, rows, width, dropout)
    exact = [each.double().requires_grad_() for each in (states, residual, weight, bias, torch.zeros(width))]
    dropped = (exact[0] + exact[4]) * kept / (1 - dropout) if dropout < 1 else 0 * (exact[0] + exact[4])
    expected = F.layer_norm(dropped + exact[1], (width,), exact[2], exact[3], 1e-5)
    expected.backward(gradient.double())
    got = {"states": of_states, "residual": of_total}
    got |= dict(zip(("weight", "bias", "bias before"), ops.column_sums(parts), strict=True))
    names = ("states", "residual", "weight", "bias", "bias before")
    wanted = {name: each.grad for name, each in zip(names, exact, strict=True)}
    errors = {name: error(got[name], wanted[name]) for name in got if wanted[name].norm()}
    return {
        "errors": {"normed": error(normed, expected.detach()), **errors},
        "kept": kept.mean().item(),
        "same mask": torch.equal(of_states != 0, (kept != 0) & (of_total != 0)) if dropout else True,
        "same bits": all(map(torch.equal, (of_total, ops.column_sums(parts)), (again[0], ops.column_sums(again[2])))),
    }


def of_columns(rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Errors of the backward of GELU and of matrices side by side, of which one lies within a wider one."""
    errors = {}
    for approximate in ("none", "tanh"):
        gradient, states = torch.randn(rows, width).to(dtype), 2 * torch.randn(rows, width).to(dtype)
        of_states, parts = ops.gelu_backward(gradient, states, approximate)
        exact = states.double().requires_grad_()
        F.gelu(exact, approximate=approximate).backward(gradient.double())
        assert exact.grad is not None
        errors[f"gelu {approximate}"] = error(of_states, exact.grad)
        errors[f"bias of gelu {approximate}"] = error(ops.column_sums(parts), exact.grad.sum(0))
    first, second, wide = (torch.randn(rows, each).to(dtype) for each in (width, width, 2 * width))
    joined, parts = ops.join(first, second, wide[:, width:])
    expected = torch.cat([first, second, wide[:, width:]], 1).double()
    errors |= {"join": error(joined, expected), "biases of join": error(ops.column_sums(parts), expected.sum(0))}
    return {"errors": errors, "kept": 1.0, "same mask": True, "same bits": True}


def of_stable_adamw() -> dict[str, Any]:
    """How far six steps of StableAdamW's kernels are from float64, with small pieces and with those of a GPU; and
    whether a run that begins again at its state has the same bits."""
    found: dict[str, Any] = {"errors": {}, "same bits": True}
    for piece, tile, longest in ((64, 32, 200), (kernels.PIECE, kernels.TILE["tile"], kernels.PIECE + 3000)):
        with mock.patch.dict(kernels.TILE, piece=piece, tile=tile), mock.patch.object(kernels, "PIECE", piece):
            grouped._layout.cache_clear()
            whole, resumed = (take_steps(torch.float32, longest, stop) for stop in (None, 2))
            exact = take_steps(torch.float64, longest, None)
        found["same bits"] &= all(torch.equal(whole[name], resumed[name]) for name in whole)
        found["errors"] |= {f"{name}, {piece}": error(whole[name], exact[name]) for name in exact}
    return found


def take_steps(dtype: torch.dtype, longest: int, stop: int | None) -> dict[str, Tensor]:
    """Weights and states after six steps, of which one is skipped and one has large gradients; after the step `stop`
    another optimizer goes on with copies of them."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"matrix": (9, 40), "vector": (33,), "single": (1,), "long": (longest,)}
    weights = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    state: dict[str, dict[str, Tensor]] = {}

    def build() -> tuple[nn.ParameterDict, clipped.ClippedAdamW]:
        module = nn.ParameterDict({name: nn.Parameter(each.clone()) for name, each in weights.items()})
        optimizer = StableAdamW(learning_rate=0.01, weight_decay=0.1, eps=1e-4).build(module, fused=True)
        assert isinstance(optimizer, clipped.ClippedAdamW)
        optimizer.has_kernels = True  # of float64 it takes torch's
        for name, values in state.items():
            optimizer.state[module[name]] = {key: value.clone() for key, value in values.items()}
        return module, optimizer

    module, optimizer = build()
    for step in range(6):
        for name, each in module.items():
            gradient = torch.randn(shapes[name], generator=draw) * (20.0 if step >= 3 and name != "vector" else 1.0)
            each.grad = gradient.to(dtype)
        optimizer.found_inf = torch.tensor(float(step == 4))
        optimizer.step()
        if step == stop:
            weights = {name: each.detach() for name, each in module.items()}
            state = {name: optimizer.state[each] for name, each in module.items()}
            module, optimizer = build()
    result = {name: each.detach() for name, each in module.items()}
    return result | {
        f"{key} of {name}": value for name, each in module.items() for key, value in optimizer.state[each].items()
    }


class Calls(TorchDispatchMode):
    """Counts the fused kernels' operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func`."""
        name = func._schema.name.split("::")[1]
        if func.namespace == "terakoya" and hasattr(ops, name):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def of_model(name: str) -> dict[str, Any]:
    """Errors of all gradients beside those of Transformers in float64, with the same dropout, as shares of the largest
    gradient's hundredth at least; and which operations the model used."""
    torch.manual_seed(1)
    model = rounded(MODELS[name]()).train()
    model.embeddings.dropout = nn.Identity()
    exact = copy.deepcopy(model).double()
    seeds: list[Tensor] = []
    draw, calls = ops.draw_seed, Calls()
    kept = (kept_by(seed, 48, 32, 0.25) for seed in seeds)
    replace_dropouts(exact, lambda: Given(lambda: next(kept)))
    with mock.patch.object(ops, "draw_seed", lambda device: seeds.append(draw(device)) or seeds[-1]):
        widths = fused_widths(model)
        WeightCopies(model, fused=True)
        found = errors(model, exact, watching=calls)
    return {"errors": found, "calls": calls.counts, "widths": widths, "seeds": len({int(each) for each in seeds})}


def gradients(block: nn.Module) -> list[Tensor]:
    """Gradients of the input and the weights of `block`, with dropout."""
    block.zero_grad()
    torch.manual_seed(2)
    states, weights = torch.randn(2, 12, 32).bfloat16().requires_grad_(), torch.randn(2, 12, 32)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        (block(states) * weights).sum().backward()
    return [states.grad, *(each.grad for each in block.parameters())]  # type: ignore[list-item]


def of_blocks(ways: Sequence[str]) -> dict[str, bool]:
    """Whether a block's gradients are the same bits when it runs again, with `full` and `selective` recomputation in
    the backward, and as one `graph`."""
    torch.manual_seed(1)
    block = rounded(MODELS["bert"]().encoder.layer[0]).train()
    WeightCopies(block, fused=True)
    block.attention.self.config._attn_implementation = "sdpa"
    expected, found = gradients(block), {}
    for way in ways:
        other = copy.deepcopy(block)
        if way == "graph":
            other.compile(backend="aot_eager", fullgraph=True)
        elif way != "again":
            checkpoint_block(other, way)  # type: ignore[arg-type]
        found[way] = all(map(torch.equal, gradients(other), expected))
    return found


def of_self_check() -> dict[str, str | None]:
    """What the check says of the kernels, and of kernels that are wrong, by what is wrong with them."""
    from terakoya_precision.fused import column_kernels, norm_kernels

    device = torch.device("cpu")
    backward, sums = norm_kernels.sum_norm_backward, column_kernels.column_sums

    def other_mask(given: Any, seed: Tensor | None, *further: Any) -> None:
        backward(given, None if seed is None else seed + 1, *further)

    def raises(*_: Any) -> None:
        raise RuntimeError("no code for this device\nand more")

    wrong: dict[str, tuple[Any, str, Any]] = {
        "scale": (norm_kernels, "scale", lambda _: 1.0),
        "mask": (norm_kernels, "sum_norm_backward", other_mask),
        "share": (norm_kernels, "threshold", lambda _: 2**30),
        "sums": (column_kernels, "column_sums", lambda parts, into: sums(parts[1:], into)),
        "error": (column_kernels, "join", raises),
    }
    before = torch.get_rng_state()
    with mock.patch.object(self_check, "ROWS", 20):
        found = {"right": self_check.failure(device, [16])}
        for name, (module, function, other) in wrong.items():
            with mock.patch.object(module, function, other):
                found[name] = self_check.failure(device, [16])
    assert torch.equal(before, torch.get_rng_state())
    return found


def main() -> None:
    """Prints what was seen."""
    asked, seen = json.loads(sys.argv[1]), {}
    torch.manual_seed(0)
    for rows in asked["rows"]:
        for width in asked["widths"]:
            for kind in asked["dtypes"]:
                dtype = getattr(torch, kind)
                for dropout in (0.0, 0.1):
                    seen[f"sum_norm {rows} {width} {kind} {dropout}"] = of_sum_norm(rows, width, dtype, dropout)
                seen[f"columns {rows} {width} {kind}"] = of_columns(rows, width, dtype)
    sys.stdout.write(
        json.dumps(
            {
                "kernels": seen,
                "all dropped": of_sum_norm(7, 64, torch.bfloat16, 1.0),
                "models": {name: of_model(name) for name in asked["models"]},
                "blocks": of_blocks(asked["blocks"]),
                "check": of_self_check() if asked["check"] else {},
                "stable_adamw": of_stable_adamw() if asked["check"] else {},
            }
        )
    )


if __name__ == "__main__":
    main()
