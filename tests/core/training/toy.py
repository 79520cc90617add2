"""A toy run for tests: a store of made-up words, a tiny BERT, started in one process or several."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from word_tokenizer import WordTokenizer, make_folder

from terakoya.data.corpus import Corpus
from terakoya.data.prepare import prepare

SYLLABLES = ["ka", "mi", "to", "ne", "ru", "sa", "yo", "hi"]


def make_store(folder: Path, *, documents: int, seed: int, unit: str = "document") -> Path:
    """A token store of `documents` documents in which each word says much about the next."""
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        text = []
        for _ in range(draw.randint(1, 6)):
            word = draw.randrange(40)
            words = []
            for _ in range(draw.randint(2, 12)):
                words.append("".join(SYLLABLES[(word * k + k) % 8] for k in range(1, 3)))
                word = (3 * word + 7 + (draw.random() < 0.2)) % 40
            text.append(" ".join(words))
        lines.append(json.dumps({"text": "\n".join(text)}))
    folder.mkdir(parents=True)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("\n".join(lines))
    tokenizer = make_folder(folder / "tokenizer", size=200)
    prepare(Corpus([corpus]), WordTokenizer(has_eos=False), tokenizer, folder / "store", unit=unit)  # type: ignore[arg-type]
    return folder / "store"


def parameters(store: Path, validation: Path | None = None, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a toy run; `changes` replace whole keys."""
    return {
        "data": {"train": [str(store)], "validation": [str(validation)] if validation else [], "sequence_length": 32},
        "architecture": {
            "type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 32,
        },
        "objective": {"type": "masked_lm", "mlm_probability": 0.2},
        "optimizer": {"type": "adamw", "learning_rate": 0.005},
        "schedule": {"type": "linear", "warmup_steps": 4},
        "batch_size": {"-1": 16},
        "micro_batch_size": 5,
        "max_steps": 12,
        "logging_steps": 1,
        "checkpoint": {"save_steps": 5},
        "evaluation": {"steps": 6, "batches": 2} if validation else None,
        **changes,
    }  # fmt: skip


def without_dropout(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """`architecture` with both dropouts off."""
    return {**architecture, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def start(
    file: Path, out: Path, *arguments: str, nodes: Sequence[int] = (1,), environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Starts `terakoya train FILE --out OUT ARGUMENTS` with `nodes[i]` processes on pretended node i."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
    if len(places) > 1:
        common |= {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank, (node, local) in enumerate(places):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)} if len(places) > 1 else {}
        command = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(out), *arguments]
        started.append(
            subprocess.Popen(
                command, env={**common, **mine}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    return started


def finish(started: Sequence[subprocess.Popen[str]], *, code: int | None = 0, seconds: float = 120.0) -> str:
    """Waits for all; returns what rank 0 printed. Fails if an exit code is not `code` (None: any)."""
    outputs = [process.communicate(timeout=seconds)[0] for process in started]
    codes = [process.returncode for process in started]
    assert code is None or codes == [code] * len(codes), f"exit codes {codes}\n" + "\n---\n".join(outputs)
    return outputs[0]


def train(settings: Mapping[str, Any], out: Path, *arguments: str, nodes: Sequence[int] = (1,), code: int = 0) -> str:
    """Runs to the end and returns what rank 0 printed."""
    file = out.parent / f"{out.name}.json"
    file.write_text(json.dumps(settings))
    return finish(start(file, out, *arguments, nodes=nodes), code=code)


def records(out: Path, kind: str = "step") -> dict[int, dict[str, Any]]:
    """The objects of one kind in `metrics.jsonl` by step; after a resume the later one stands."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def losses(out: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {step: (line["loss"], line["grad_norm"]) for step, line in records(out).items()}
