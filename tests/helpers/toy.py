"""A toy run for tests: a store of made-up words, a tiny BERT, started in one process or several."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.process
import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server
import torch
from safetensors.torch import load_file
from small_preparation import prepare_corpus
from word_tokenizer import WordTokenizer, make_folder

from terakoya.corpus.corpus import Corpus

SYLLABLES = ["ka", "mi", "to", "ne", "ru", "sa", "yo", "hi"]


def make_store(folder: Path, *, documents: int, seed: int, unit: str = "document", vocabulary: int = 200) -> Path:
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
    tokenizer = make_folder(folder / "tokenizer", size=vocabulary)
    prepare_corpus(Corpus([corpus]), WordTokenizer(has_eos=False), tokenizer, folder / "store", unit=unit)  # type: ignore[arg-type]
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
        "precision": "fp32",
        "logging_steps": 1,
        "checkpoint": {"save_steps": 5},
        "evaluation": {"steps": 6, "batches": 2} if validation else None,
        **changes,
    }  # fmt: skip


def without_dropout(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """`architecture` with both dropouts off."""
    return {**architecture, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass
class Process:
    """One started process and the file it prints to."""

    process: multiprocessing.process.BaseProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def running(self) -> bool:
        return self.process.is_alive()


def start(
    settings: Mapping[str, Any],
    out: Path,
    *arguments: str,
    folder: Path | None = None,
    nodes: Sequence[int] = (1,),
    environment: Mapping[str, str] | None = None,
    environment_of_rank: Sequence[Mapping[str, str]] = (),
    arguments_of_rank: Sequence[Sequence[str]] = (),
    plugins: Sequence[Path] = (),
) -> list[Process]:
    """Starts `terakoya train FILE --out OUT ARGUMENTS` with `nodes[i]` processes on pretended node i, each with the
    variables of `environment`, its own of `environment_of_rank`, and its own `arguments_of_rank`. FILE, which holds
    `settings`, and what they print are in `folder`, by default beside `out`."""
    folder = folder or out.parent
    file = folder / f"{out.name}.json"
    file.write_text(json.dumps(settings))
    options = [text for plugin in plugins for text in ("--plugin", str(plugin))]
    command = [*options, "train", str(file), "--out", str(out), *arguments]
    started = []
    for rank, variables in enumerate(launched(nodes)):
        output = folder / f"{out.name}.{rank}.{os.urandom(4).hex()}.txt"
        own = environment_of_rank[rank] if environment_of_rank else {}
        further = arguments_of_rank[rank] if arguments_of_rank else ()
        process = fork(_command_line, [*command, *further], {**(environment or {}), **own, **variables}, output)
        started.append(Process(process, output))
    return started


def launched(nodes: Sequence[int]) -> list[dict[str, str]]:
    """The variables of a launcher for `nodes[i]` processes on pretended node i, by rank; none for one that is alone."""
    places = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    if len(places) == 1:
        return [{}]
    common = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
        for rank, (node, local) in enumerate(places)
    ]


def free_port() -> int:
    """A port of this machine at which nothing listens, below those that Linux gives to whoever asks for any: one of
    those could be gone before the process that is to listen has started."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def become(variables: Mapping[str, str], output: Path) -> None:
    """Makes this process one that was started with `variables` set and prints into `output`."""
    assert "warm" in sys.modules, "the fork server could not import it, and says nothing of that"
    os.environ.update(variables)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["warm"])


def start_fork_server() -> None:
    """Starts the server that forks processes for `fork`, and for whatever in this process uses a `forkserver`."""
    fork_server.start()


def fork(target: Callable[..., object], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Starts `target(*arguments)` in a process that has imported all that `warm` imports."""
    start_fork_server()
    process = FORKSERVER.Process(target=target, args=arguments)
    process.start()
    return process


def _command_line(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """The command line in a forked process: a process of its own, without the seconds that its imports take."""
    from terakoya.commands.main import main

    become(environment, output)
    main(arguments)


def finish(started: Sequence[Process], *, code: int | None = 0, seconds: float = 800.0) -> str:
    """Waits for all; returns what rank 0 printed. Fails if an exit code is not `code` (None: any)."""
    for each in started:
        each.process.join(seconds)
    codes = [each.process.exitcode for each in started]
    printed = [each.output.read_text() if each.output.exists() else "" for each in started]
    for each in started:
        if each.running():
            each.process.kill()
    assert code is None or codes == [code] * len(codes), f"exit codes {codes}\n" + "\n---\n".join(printed)
    return printed[0]


def train(
    settings: Mapping[str, Any],
    out: Path,
    *arguments: str,
    nodes: Sequence[int] = (1,),
    code: int | None = 0,
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs to the end and returns what rank 0 printed. Fails if an exit code is not `code` (None: any)."""
    return finish(start(settings, out, *arguments, nodes=nodes, plugins=plugins, environment=environment), code=code)


def records(out: Path, kind: str = "step") -> dict[int, dict[str, Any]]:
    """The objects of one kind in `metrics.jsonl` by step; after a resume the later one stands. A line that is being
    written is none yet."""
    whole = (out / "metrics.jsonl").read_text().rpartition("\n")[0]
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def losses(out: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {step: (line["loss"], line["grad_norm"]) for step, line in records(out).items()}


def saved(checkpoint: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint's `state/`, put together as its module says that they lie there."""
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for path in sorted((checkpoint / "state").glob(f"{kind}-*.safetensors")):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        pieces = json.loads(header.get("__metadata__", {}).get("pieces", "{}"))
        for key, value in load_file(path).items():
            name, shape, start = pieces.get(key, (key, value.shape, 0))
            there = whole.setdefault(name, torch.zeros(tuple(shape), dtype=value.dtype))
            times = written.setdefault(name, torch.zeros(tuple(shape), dtype=torch.int64))
            if isinstance(start, int):
                box: Any = slice(start, start + value.numel())
                there, times, value = there.view(-1), times.view(-1), value.flatten()
            else:
                box = tuple(slice(at, at + size) for at, size in zip(start, value.shape, strict=True))
            there[box] = value
            times[box] += 1
    assert all(bool((times == 1).all()) for times in written.values()), "each element is written once"
    return whole
