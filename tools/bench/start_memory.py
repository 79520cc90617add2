"""Host memory that each process of a sharded run needs for its start and for a checkpoint with `model/`: a table.

    python tools/bench/start_memory.py                                    a Llama of 0.3B parameters, fsdp, 2 processes
    python tools/bench/start_memory.py --parallel '{"tp_size": 2}'
    python tools/bench/start_memory.py --start-from FOLDER                a folder that --export wrote

Nothing is trained: the run is built, as `terakoya train` builds it, and its step 0 is saved. Figures are the largest
resident memory of a process (Linux's VmHWM) minus that before, next to the bytes of its own part of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines

MIB = 2**20
RANK = "TERAKOYA_START_MEMORY"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default='{"engine": "fsdp"}', help="the section parallel of the parameters")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--start-from", type=Path, help="a Transformers folder of such a model")
    parser.add_argument("--export", type=Path, help="copy the saved model here, for --start-from")
    arguments = parser.parse_args()
    if RANK in os.environ:
        return measure(json.loads(os.environ[RANK]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = lines.drawn(
            folder / "tokenizer", count=200, mean_length=60, sequence_length=128, vocabulary_size=arguments.vocabulary
        )
        store = data.store(folder / "store").folder
        work = {"parameters": parameters(store, arguments), "folder": str(folder / "run")}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [start(rank, arguments.processes, port, work) for rank in range(arguments.processes)]
        if any(rank.wait() for rank in ranks):
            return 1
        if arguments.export is not None:
            next((folder / "run").rglob("model")).rename(arguments.export)
    return 0


def parameters(store: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameter JSON."""
    hidden = arguments.hidden_size
    return {
        "data": {"train": [str(store)], "sequence_length": 128},
        "architecture": {
            "type": "llama", "hidden_size": hidden, "intermediate_size": 11 * hidden // 4,
            "num_hidden_layers": arguments.layers, "num_attention_heads": hidden // 64, "max_position_embeddings": 128,
        },
        "objective": {"type": "causal_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 1e-4}, "schedule": {"type": "constant"},
        "precision": "fp32",
        "batch_size": {"-1": 8}, "micro_batch_size": 1, "max_steps": 1,
        "checkpoint": {"model": "every"},
        "parallel": json.loads(arguments.parallel),
        **({"start_from": str(arguments.start_from.resolve())} if arguments.start_from else {}),
    }  # fmt: skip


def start(rank: int, processes: int, port: int, work: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts one process of the run, which meets the others at `port`."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "memory", RANK: json.dumps(work),
    }  # fmt: skip
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([sys.executable, __file__], env=environment)


def measure(work: dict[str, Any]) -> int:
    """Builds and saves the run in this process, and prints what it took."""
    from terakoya.config.parameters import Parameters
    from terakoya.distributed.context import connect
    from terakoya.distributed.topology import LaunchInfo
    from terakoya.rows.stores import Stores
    from terakoya.training import saving, setup
    from terakoya.training.checkpoint import checkpoint
    from terakoya.training.run_log import RunLog

    setup._warm_up = lambda *_: None  # the gradients of its backward are as large as the weights
    read, out = Parameters.from_dict(work["parameters"], source="start_memory.py"), Path(work["folder"])
    context = connect(LaunchInfo.from_environment(), replica_size=read.parallel.replica_size)
    if context.is_main:
        (out / "checkpoints").mkdir(parents=True)
    context.barrier()
    run_log = RunLog(out, [], read.dump(), active=context.is_main)
    watch = Watch()
    trainer = setup.build_trainer(read, out, Stores.open(read.data), context, run_log)
    said = [f"start {watch.peak():,.0f} MiB, {watch.seconds():.0f} s"]
    say(f"rank {context.rank}: {said[0]}")
    engine: Any = trainer.engine
    own = sum(value.nbytes for _, value in engine.model_state())
    watch = Watch()
    tokenizer = trainer.run.tokenizer_folder
    folders = saving.ModelFolders(None, read, trainer.run.vocabulary, True, tokenizer, trainer.facts["started_from"])
    write = partial(saving.write_model_folders, folders=folders)
    content = checkpoint.Content({"consumed_rows": 0}, engine, {}, write)
    checkpoint.save(checkpoint.Place(out / "checkpoints", tokenizer, 2), 0, context, content)
    said.append(f"save {watch.peak():,.0f} MiB, {watch.seconds():.0f} s")
    sizes = {name: 4 * math.prod(shape) for name, shape in trainer.shapes.items()}
    whole, block = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers.0." in name)
    sizes_of = f"own part {own / MIB:,.0f} MiB of {whole / MIB:,.0f} MiB, a block {block / MIB:,.0f} MiB"
    say(f"rank {context.rank}: {'; '.join([sizes_of, *said])}")
    run_log.close()
    context.close(waits=True)
    return 0


def say(line: str) -> None:
    """Prints `line` in one write, since all processes print to the same place."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Watch:
    """Measures from its creation on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        self.before, self.began = self._read("VmRSS"), time.perf_counter()

    def peak(self) -> float:
        """The largest resident memory since, minus that at the beginning, in MiB."""
        return self._read("VmHWM") - self.before

    def seconds(self) -> float:
        """The time since, in seconds."""
        return time.perf_counter() - self.began

    def _read(self, name: str) -> float:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
