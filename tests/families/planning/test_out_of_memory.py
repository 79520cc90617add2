"""Real out-of-memory errors, under a limit on the process's address space."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from terakoya.config.parameters import RESUME_MAY_CHANGE, Parameters
from terakoya.distributed.topology import RankBatch
from terakoya_planning.out_of_memory import is_out_of_memory, remedies, requested_bytes

PROGRAM = """
import resource, sys
import terakoya_planning.estimate, terakoya.training.setup
from terakoya.commands.main import main
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 26), size + (3 << 26)))
main(sys.argv[1:])
"""
"""The command line, with 0.19 GiB more than its process uses."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space are Linux's")
@pytest.mark.skipif(torch.version.cuda is not None, reason="beside CUDA's libraries the limit stops the estimate, too")
def test_a_run_that_runs_out_of_memory_suggests_settings_and_their_savings(
    store: Path, tmp_path: Path, warm_python: Path
) -> None:
    raw = toy.parameters(store, batch_size={"-1": 16384}, micro_batch_size=None)
    (tmp_path / "run.json").write_text(json.dumps(raw))
    command = [warm_python, "-c", PROGRAM, "train", str(tmp_path / "run.json"), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"rank 0: this machine is out of memory: 0\.\d\d GB more were requested", done.stderr), done.stderr
    assert re.search(
        r"a step takes \d\.\d\d GB of tensors at its peak, in the \w+.*, most of it activations", done.stderr
    )
    remedies = re.findall(r"^  (\S+) .* -> (.+): about (\d+\.\d\d) GB less", done.stderr, re.MULTILINE)
    assert len(remedies) == 3
    saved = [float(gigabytes) for _, _, gigabytes in remedies]
    assert saved == sorted(saved, reverse=True)
    assert ("micro_batch_size", "8192") in [(key, value) for key, value, _ in remedies]
    assert ("activation_checkpointing", '"full"') in [(key, value) for key, value, _ in remedies]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert recorded[-1]["kind"] == "error" and "out of memory" in recorded[-1]["text"]


def test_a_run_resumes_with_the_settings_that_are_said_to_keep_it(store: Path) -> None:
    architecture = {
        "type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 512,
    }  # fmt: skip
    settings = toy.parameters(store, architecture=architecture, objective={"type": "causal_lm"})
    settings["data"]["sequence_length"] = 512
    parameters = Parameters.from_dict(settings, source="test")
    rank_batch = RankBatch(start=0, stop=16, micro_batch_size=8, micro_steps=2, global_rows=32)
    suggested = {remedy.key: remedy.same_run for remedy in remedies(parameters, rank_batch, world_size=2)}
    assert len(suggested) == 6
    assert {key for key, same in suggested.items() if same} == suggested.keys() & RESUME_MAY_CHANGE


def test_errors_of_real_allocators_are_recognised() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 60, dtype=np.uint8)
    for error in (of_torch.value, of_numpy.value):
        assert is_out_of_memory(error)
    assert requested_bytes(str(of_torch.value)) == 1 << 55
    assert requested_bytes(str(of_numpy.value)) == 1 << 60
    assert requested_bytes("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity") == 20 << 30
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as other:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(other.value)
