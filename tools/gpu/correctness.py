"""Part A: does terakoya run on this GPU, and is it right?"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fused_kernels import fused
from settings import ROOT, Measurement, Settings, Stage, preset
from torch import Tensor

from terakoya.components import Batch
from terakoya.config.parameters import Parameters
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import to_device
from terakoya.training.engines.engine import autocast_forward
from terakoya.training.loss import weighted_loss
from terakoya.training.model.bf16_stream import WeightCopies
from terakoya.training.model.build import build_module

PRESETS = ("bert_base", "electra_small", "modernbert_base", "t5_base", "gpt2_125m", "llama_1b")
"""One of each architecture that differs in its attention, its positions or its losses."""
TWO_LAYERS = {"num_hidden_layers": 2}
STRAIGHT = "straight"
"""The folder of the run that is not stopped."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"type": "adamw", "learning_rate": 1e-4},
    "adamw, uncorrected": {"type": "adamw", "learning_rate": 1e-4, "bias_correction": False},
    "lion": {"type": "lion", "learning_rate": 1e-5},
    "muon": {"type": "muon", "learning_rate": 1e-3},
    "adafactor": {"type": "adafactor"},
}


def facts(settings: Settings) -> Iterator[Measurement]:
    """The machine: what it is, how fast it copies and multiplies. These are the ceilings of all rates."""
    device, size = settings.device, 2**20 if settings.tiny else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = time_of(partial(target.copy_, source), device)
    yield {"what": "copy", "bytes": 2 * size, "terabytes_per_second": 2 * size / seconds / 1e12}
    shapes = [(64, 64, 64)] if settings.tiny else [(16384, 768, 3072), (16384, 768, 768), (8192, 8192, 8192)]
    for rows, inner, columns in shapes:
        left, right = (torch.randn(*shape, device=device).bfloat16() for shape in ((rows, inner), (inner, columns)))
        seconds = time_of(partial(torch.matmul, left, right), device)
        yield {
            "what": "product", "shape": [rows, inner, columns], "tflops": 2 * rows * inner * columns / seconds / 1e12,
        }  # fmt: skip
    for name, command in (
        ("nvidia-smi", ["nvidia-smi"]),
        ("packages", [sys.executable, "-m", "pip", "list"]),
        ("doctor", [sys.executable, "-m", "terakoya", "doctor", "--json"]),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield {"command": name, "error": str(error)}
            continue
        (settings.out / f"{name}.txt").write_text(done.stdout + done.stderr)
        yield {"command": name, "exit_code": done.returncode}


def command(settings: Settings) -> Iterator[Measurement]:
    """`terakoya train` as a user starts it: a run of 20 steps; the same stopped by SIGTERM and resumed, to the bit."""
    raw = {**preset("bert_base", settings, rows=8, **TWO_LAYERS), "max_steps": 20, "logging_steps": 5}
    raw["architecture"] |= {"attention_probs_dropout_prob": 0.0}  # flash attention, where there is a GPU
    yield from resumed_run(settings, raw)


def graphs(settings: Settings) -> Iterator[Measurement]:
    """The same with CUDA graphs, and whether they compute what the compiled model computes without them."""
    raw = {**preset("electra_small", settings, rows=8, **TWO_LAYERS), "max_steps": 20, "logging_steps": 5}
    settings = replace(settings, work=settings.work / "graphs")  # beside the runs of `command`
    settings.work.mkdir()
    yield from resumed_run(settings, raw if settings.tiny else {**raw, "cuda_graphs": True})
    compiled = start_command(settings, raw if settings.tiny else {**raw, "compile": "whole"}, "compiled")
    output = compiled.communicate()[0]
    yield {
        "what": "without graphs", "exit_code": compiled.returncode, "same_bits": same_state(settings, "compiled"),
        "said": output[-2000:] if compiled.returncode else "",
    }  # fmt: skip


def resumed_run(settings: Settings, raw: Mapping[str, Any]) -> Iterator[Measurement]:
    """A run of `raw`, and the same stopped by SIGTERM in its first steps and resumed: are the last weights the same?"""
    begun = time.monotonic()
    straight = start_command(settings, raw, STRAIGHT)
    output = straight.communicate()[0]
    yield {
        "what": "20 steps", "exit_code": straight.returncode, "seconds": time.monotonic() - begun,
        "said": output[-2000:] if straight.returncode else "",
    }  # fmt: skip
    stopped = start_command(settings, raw, "resumed")
    metrics = settings.work / "resumed" / "metrics.jsonl"
    while stopped.poll() is None and not (metrics.exists() and '"step": 1,' in metrics.read_text()):
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    output = stopped.communicate()[0]
    yield {"what": "SIGTERM", "exit_code": stopped.returncode, "said": output[-300:]}
    resumed = start_command(settings, raw, "resumed")
    output = resumed.communicate()[0]
    yield {
        "what": "resumed", "exit_code": resumed.returncode, "same_bits": same_state(settings, "resumed"),
        "said": output[-2000:] if resumed.returncode else "",
    }  # fmt: skip


def start_command(settings: Settings, raw: Mapping[str, Any], name: str) -> subprocess.Popen[str]:
    """Starts `terakoya train` with `raw` in the folder `name`."""
    file = settings.work / f"{name}.json"
    file.write_text(json.dumps({**raw, "checkpoint": {"save_steps": 10, "keep": 3}}))
    words = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(settings.work / name)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def same_state(settings: Settings, name: str) -> bool:
    """Whether the run in the folder `name` ended with the state of the one that was not stopped."""
    straight = state_hashes(settings.work / STRAIGHT)
    return bool(straight) and straight == state_hashes(settings.work / name)


def state_hashes(run: Path) -> dict[str, str]:
    """Returns a SHA-256 of the tensors of each file of weights and optimizer state in the last checkpoint of `run`:
    without the file's other entries, which are in any order."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    files = sorted(checkpoints[-1].rglob("*.safetensors")) if checkpoints else []
    hashes = {}
    for each in files:
        content = each.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")  # safetensors: the header's length, the header, the data
        header = json.loads(content[8:end])
        header.pop("__metadata__", None)
        tensors = json.dumps(header, sort_keys=True).encode() + content[end:]
        hashes[str(each.relative_to(run))] = hashlib.sha256(tensors).hexdigest()
    return hashes


def parity(settings: Settings) -> Iterator[Measurement]:
    """Losses and gradients of two layers of each architecture, beside float32 on the CPU."""
    variants = [("fp32", "sdpa"), ("bf16", "sdpa"), ("bf16", "flash")]
    for name in PRESETS:
        layers = {"num_layers": 2} if name.startswith("t5") else TWO_LAYERS
        raw = {**preset(name, settings, rows=4, **layers), "precision": "fp32"}
        parameters = Parameters.from_dict(raw, source=name)
        opened = TokenStore.open(Path(raw["data"]["train"][0]))
        layout, length = parameters.objective.row_layout(), parameters.data.sequence_length
        rows = RowSource(opened, layout, sequence_length=length, seed=1, store_id=0).load(0, range(4))  # type: ignore[arg-type]
        batch = parameters.objective.collate(rows, opened.facts.vocabulary)
        step = partial(loss_and_gradient, parameters, batch, opened)
        loss, gradient = step(torch.device("cpu"), "fp32", "sdpa")
        for precision, backend in variants:
            if backend == "flash" and (settings.tiny or name.startswith("t5")):
                continue
            its_loss, its_gradient = step(settings.device, precision, backend)
            again = step(settings.device, precision, backend)[1]
            yield {
                "preset": name, "precision": precision, "attention": backend,
                "loss_error": abs(its_loss / loss - 1),
                "gradient_error": float((its_gradient - gradient).norm() / gradient.norm()),
                "same_bits_twice": torch.equal(its_gradient, again),
            }  # fmt: skip


def loss_and_gradient(
    parameters: Parameters, batch: Batch, opened: TokenStore, device: torch.device, precision: str, backend: str
) -> tuple[float, Tensor]:
    """Returns the loss of `batch` without dropout and the gradient of all weights, float64 on the CPU."""
    module = build_module(parameters, opened.facts.vocabulary)
    attention.use(module, backend)
    module.to(device).eval()
    if precision == "bf16":
        WeightCopies(module)
    autocast_forward(module, device, precision)
    sums = module(to_device(batch, device, flash=backend == "flash"))
    loss = weighted_loss(sums, parameters.objective.terms(), batch.counts)
    loss.backward()
    gradients = [each.grad.flatten().double().cpu() for each in module.parameters() if each.grad is not None]
    return float(loss.detach()), torch.cat(gradients)


class WaitsForbidden:
    """A clock for `ours.run` that makes a step which waits for the device an error, beside the first and the last."""

    def __init__(self, steps: int) -> None:
        self.steps, self.ended = steps, 0

    def step_ended(self) -> None:
        """Switches the error on after the second step, off before the last."""
        self.ended += 1
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if 2 <= self.ended < self.steps - 1 else "default")


def waits(settings: Settings) -> Iterator[Measurement]:
    """Whether any step waits for the device, for every optimizer."""
    import ours

    for name, optimizer in OPTIMIZERS.items():
        raw = {**preset("bert_base", settings, rows=4, **TWO_LAYERS), "optimizer": dict(optimizer)}
        try:
            ours.run(raw, 8, WaitsForbidden(8))  # type: ignore[arg-type]
            error = ""
        except Exception as raised:  # noqa: BLE001 - the measurement is whether it fails
            error = f"{type(raised).__name__}: {raised}"[:500]
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        yield {"optimizer": name, "waits": "synchronizing" in error, "error": error}  # else a package may be missing


def boundaries(settings: Settings) -> Iterator[Measurement]:
    """What room for documents that are not there costs flash attention, and what torch's masked attention takes."""
    tokens, heads, size = (512, 2, 16) if settings.tiny else (16_384, 12, 64)
    count = tokens // 208
    device, scalar = settings.device, torch.float32 if settings.tiny else torch.bfloat16
    draw = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=draw)[: count - 1].sort().values + 1
    longest = tokens // 32

    def states(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device=device, dtype=scalar, requires_grad=True) for _ in range(3)]

    if not settings.tiny:
        from torch.nn.attention.varlen import varlen_attn

        for room in (count, 128, 512, 2048, 8192, 16_384):
            edges = torch.full((room + 1,), tokens, dtype=torch.int32)
            edges[:count] = torch.cat([torch.zeros(1, dtype=torch.int32), cuts.int()])
            edges = edges.to(device)
            flat = states(tokens, heads, size)
            yield {
                "kernel": "varlen", "room": room,
                **both_ways(partial(varlen_attn, *flat, edges, edges, tokens, tokens), flat, device),
            }  # fmt: skip
    rows = states(32, heads, longest, size)
    document_ids = torch.arange(longest, device=device).div(208, rounding_mode="floor").expand(32, -1)
    mask = attention.document_mask(document_ids)
    for name, given in {
        "masked": {"attn_mask": mask},
        "masked, dropout 0.1": {"attn_mask": mask, "dropout_p": 0.1},
        "masked, dropout 1/16": {"attn_mask": mask, "dropout_p": 1 / 16},
        "whole rows": {},
        "causal": {"is_causal": True},
    }.items():
        call = partial(F.scaled_dot_product_attention, *rows, **given)
        yield {"kernel": f"sdpa, {name}", **both_ways(call, rows, device)}


def both_ways(call: Callable[[], Tensor], states: list[Tensor], device: torch.device) -> dict[str, float]:
    """Returns the milliseconds and the peak memory of `call` and its backward."""

    def step() -> None:
        for each in states:
            each.grad = None
        call().sum().backward()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = time_of(step, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"milliseconds": 1000 * seconds, "gigabytes": peak / 1e9}


def fp16(settings: Settings) -> Iterator[Measurement]:
    """Losses of 50 steps in bf16 and in fp16 with its loss scaling, beside float32 on the same rows."""
    import ours
    from step_clock import Clock

    steps = 5 if settings.tiny else 50
    reference: list[float] = []
    for precision in ("fp32", "bf16", "fp16"):
        raw = preset("bert_base", settings, rows=8, **TWO_LAYERS)
        raw["architecture"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        _, losses = ours.run({**raw, "precision": precision, "logging_steps": 1}, steps, Clock(warm_up=0, steps=steps))
        values = list(losses.values())
        reference = reference or values
        yield {
            "precision": precision, "first": values[0], "last": values[-1],
            "largest_difference": max(abs(a - b) for a, b in zip(values, reference, strict=True)),
        }  # fmt: skip


def memory(settings: Settings) -> Iterator[Measurement]:
    """The peak of a run's tensors beside what `estimate` says."""
    import ours
    from step_clock import Clock

    from terakoya.estimation.estimate import estimate

    for name, rows in (("bert_base", 32), ("gpt2_125m", 16)):
        raw = {**preset(name, settings, rows=rows), "micro_batch_size": 4 if settings.tiny else rows}
        parameters = Parameters.from_dict(raw, source=name)
        said = estimate(parameters, device=None if settings.tiny else "H200", processes=1).memory.peak
        if settings.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ours.run(raw, 4, Clock(warm_up=1, steps=3))
        held = torch.cuda.max_memory_allocated() if settings.device.type == "cuda" else 0
        yield {"preset": name, "rows": rows, "estimated_gigabytes": said / 1e9, "held_gigabytes": held / 1e9}


def time_of(call: Callable[[], Any], device: torch.device, *, seconds: float = 0.3) -> float:
    """Returns the median seconds of a call, after three that warm up, in about `seconds`."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


STAGES: Mapping[str, Stage] = {
    "facts": Stage(facts, 100.0),
    "command": Stage(command, 120.0),
    "parity": Stage(parity, 120.0),
    "waits": Stage(waits, 90.0),
    "boundaries": Stage(boundaries, 90.0),
    "fp16": Stage(fp16, 60.0),
    "memory": Stage(memory, 90.0),
    "graphs": Stage(graphs, 150.0),
    "fused": Stage(fused, 120.0),
}
