"""Does terakoya run on this machine, stop, resume to the bit, and hold what `estimate` says?"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_times import copy_rate, product_rates
from settings import Case, Measurement, Settings

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_planning.estimate import estimate
from terakoya_planning.out_of_memory import explain_allocation_errors

STRAIGHT, STOPPED, PLAIN = "straight", "resumed", "compiled"
"""Folders: the run that is not stopped, the one that is, and the one without CUDA graphs."""
TWO_LAYERS = {"num_hidden_layers": 2}
LITTLE_MEMORY = 3e9
"""Bytes that a run may take which is to run out of memory."""


def facts(settings: Settings) -> Iterator[Measurement]:
    """Yields how fast the machine copies and multiplies; a file has what nvidia-smi says of it."""
    yield copy_rate(settings)
    yield from product_rates(settings)
    with contextlib.suppress(FileNotFoundError):  # no NVIDIA driver
        said = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=30, check=False)
        (settings.out / "nvidia-smi.txt").write_text(said.stdout + said.stderr)


def command(settings: Settings) -> Iterator[Measurement]:
    """Yields how `terakoya train` runs as a user starts it: 20 steps; the same, stopped by SIGTERM and resumed."""
    raw = Case("bert_base", 8, 1, architecture=TWO_LAYERS).parameters(settings)
    yield from resumed_run(settings, raw)


def graphs(settings: Settings) -> Iterator[Measurement]:
    """Yields the same with CUDA graphs, and whether they compute what the compiled model computes without them."""
    raw = Case("electra_small", 8, 1, architecture=TWO_LAYERS).parameters(settings)
    settings = replace(settings, work=settings.work / "graphs")  # beside the runs of `command`
    settings.work.mkdir()
    whole, recorded = ({}, {}) if settings.tiny else ({"compile": "whole", "cuda_graphs": False}, {"cuda_graphs": True})
    plain = start(settings, {**raw, **whole}, PLAIN)
    yield from resumed_run(settings, {**raw, **recorded})
    yield {"what": "without graphs", **ended(plain), "same_bits": same_state(settings, PLAIN)}


def resumed_run(settings: Settings, raw: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yields a run of `raw`, and beside it the same, stopped by SIGTERM in its first steps and resumed: are the last
    weights the same?"""
    begun = time.monotonic()
    straight, stopped = (start(settings, raw, name) for name in (STRAIGHT, STOPPED))
    metrics = settings.work / STOPPED / "metrics.jsonl"
    while stopped.poll() is None and not (metrics.exists() and '"step": 1,' in metrics.read_text()):
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    yield {"what": "SIGTERM", **ended(stopped, expected=75)}
    yield {"what": "20 steps", **ended(straight), "seconds": time.monotonic() - begun}
    again = start(settings, raw, STOPPED)
    yield {"what": "resumed", **ended(again), "same_bits": same_state(settings, STOPPED)}


def start(settings: Settings, raw: Mapping[str, Any], name: str) -> subprocess.Popen[str]:
    """Starts `terakoya train` with 20 steps of `raw` in the folder `name`."""
    steps = {"max_steps": 20, "logging_steps": 5, "checkpoint": {"save_steps": 10, "keep": 3}}
    file = settings.work / f"{name}.json"
    file.write_text(json.dumps({**raw, **steps}))
    words = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(settings.work / name)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str], *, expected: int = 0) -> Measurement:
    """Waits for the process; returns its exit code, and the end of what it said where that is not as `expected`."""
    output = process.communicate()[0]
    code = process.returncode
    return {"exit_code": code, "said": output[-2000:], **({} if code == expected else {"error": output[-500:]})}


def same_state(settings: Settings, name: str) -> bool:
    """Returns whether the run in the folder `name` ended with the state of the one that was not stopped."""
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


def memory(settings: Settings) -> Iterator[Measurement]:
    """Yields the peak of a run's tensors beside what `estimate` says, and the advice of a run that has too little."""
    import ours
    from step_clock import Clock

    for case in (Case("bert_base", 32, 1), Case("gpt2_125m", 16, 1)):
        raw = case.parameters(settings)
        parameters = Parameters.from_dict(raw, source=case.preset)
        said = estimate(parameters, device=None if settings.tiny else "H200", processes=1).memory.peak
        if settings.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ours.run(raw, 4, Clock(warm_up=1, steps=3))
        held = torch.cuda.max_memory_allocated() if settings.device.type == "cuda" else 0
        rows = raw["micro_batch_size"]
        yield {"preset": case.preset, "rows": rows, "estimated_gigabytes": said / 1e9, "held_gigabytes": held / 1e9}
    yield {"what": "out of memory", "advice": advice(settings)}


def advice(settings: Settings) -> str:
    """Returns what a run of BERT-base says in `LITTLE_MEMORY`; on a CPU, one with a vast layer."""
    import ours
    from step_clock import Clock

    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(LITTLE_MEMORY / torch.cuda.mem_get_info()[1])
    raw = Case("bert_base", 32, 1).parameters(settings)
    if settings.tiny:
        raw["architecture"]["intermediate_size"] = 10**13  # no machine has that much
    try:
        ours.run(raw, 2, Clock(warm_up=1, steps=1), advice=explain_allocation_errors)
    except UserError as error:
        return str(error)
    finally:
        if settings.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    return "the run had enough memory"
