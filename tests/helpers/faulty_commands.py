"""The commands that write, each with one of its file calls gone wrong and then given again.

`every_fault.py` tries all that differ, or as many as there is time for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import file_faults
import file_moments
import toy
from file_faults import ACTIONS, Command, Ended, FileFaults
from file_moments import DRAFT, Moment
from labelled_examples import classified, make_model, write

from terakoya.runs.checkpoints import find_problems
from terakoya.toolkit.formats import folder_digests

LAST, MODEL = 6, {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
RUNS = {
    "bert": {"architecture": {"type": "bert", **MODEL, "max_position_embeddings": 32}},
    "electra": {
        "architecture": {"type": "electra", "embedding_size": 8, **MODEL, "max_position_embeddings": 32},
        "objective": {"type": "replaced_token", "generator_size": "1/2"},
    },
    "gpt": {
        "architecture": {
            "type": "gpt2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 32,
        },
        "objective": {"type": "causal_lm", "layout": "stream"},
    },
}  # fmt: skip
READS = {
    "prepare": "tokenizer train", "store merge": "prepare", "export": "train bert", "report": "train bert",
    "resume bert": "train bert", "fork": "train bert", "export megatron": "train gpt", "import": "export megatron",
    "average": "train bert",
}  # fmt: skip
"""The command whose result, without a fault, another command reads."""
ENDS = {"report.html": "</html>", "pipeline.json": "}"}
"""The last characters of files that say when they were made, where they are, or how quick the machine was."""
TWO = {"batch_size": {"0": 2, "1": 2}, "micro_batch_size": 2}


@dataclass(frozen=True)
class Verb:
    """A command: its arguments, in which CASE is the folder of the case, and its number of ranks."""

    arguments: tuple[str, ...]
    ranks: int = 1


@dataclass(eq=False)
class World:
    """The server, the inputs of all commands, what each gives without a fault, and where this world tries them."""

    faults: FileFaults
    folder: Path
    verbs: Mapping[str, Verb]
    place: Path

    def run(self, name: str, case: Path, **fault: Any) -> Ended:
        verb = self.verbs[name]
        if name in READS:
            self.straight(READS[name])
        if name.startswith("resume") and not case.exists():
            self.stop_early(case)
        case.mkdir(exist_ok=True)
        arguments = [text.replace("CASE", str(case)) for text in verb.arguments]
        if name == "run":
            arguments = ["run", str(pipeline(self.folder, self.place, case))]
        variables = toy.launched((1,) * verb.ranks)
        return self.faults.run(Command(arguments, str(case), variables=variables, **fault))

    def stop_early(self, case: Path) -> None:
        """Makes `case` a run that has not taken its last steps yet."""
        shutil.copytree(self.straight("train bert"), case)
        shutil.rmtree(case / f"run/checkpoints/step-{LAST:08d}")
        metrics = case / "run/metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes().partition(b'{"kind": "step", "step": 5')[0])

    def straight(self, name: str, rank: int = 0) -> Path:
        """The case of the command without a fault; the file calls of `rank` are in CASE.log."""
        case = self.folder / f"{name.replace(' ', '_')}.straight.{rank}"
        if not case.exists():
            ended = self.run(name, case, log=f"{case}.log", rank=rank)
            assert set(ended.codes) == {0}, ended.printed
        return case

    def calls(self, name: str, rank: int = 0) -> list[str]:
        """The kind of each call of `rank`, in order."""
        lines = Path(f"{self.straight(name, rank)}.log").read_text().splitlines()
        return [line.split("\t")[1] for line in lines if not line.startswith("0\t")]

    def moments(self, name: str, rank: int = 0) -> list[Moment]:
        """What `rank` finds and does at each call, in order."""
        straight = self.straight(name, rank)
        return file_moments.read(Path(f"{straight}.log"), straight)

    def content(self, name: str, case: Path) -> dict[str, str]:
        """What the command is to give: files with their hashes, and of a run its losses and its last checkpoint."""
        found = {}
        for file in (each for each in case.rglob("*") if each.is_file()):
            path = file.relative_to(case).as_posix()
            if any(part.startswith(".") for part in file.relative_to(case).parts):
                continue
            end = ENDS.get(file.name)
            if end is not None:
                found[path] = str(file.read_text(encoding="utf-8").rstrip().endswith(end))
            elif file.name == "terakoya_scores.json":  # and how long it took
                found[path] = re.sub(r'"seconds": [0-9.]+', "", file.read_text(encoding="utf-8"))
            elif name == "finetune" and file.name == folder_digests.NAME:
                found[path] = str(folder_digests.find_changes(file.parent))
            elif file.name == "metrics.jsonl":
                found[path] = str(losses(file))
            elif (not path.startswith("run/") or f"checkpoints/step-{LAST:08d}/" in path) and (
                name != "run" or file.name != "manifest.json"  # it names the case's own folders
            ):
                found[path] = hashlib.sha256(file.read_bytes()).hexdigest()
        return found

    def assert_whole(self, name: str, case: Path) -> None:
        """Whatever has its final name is as it should be."""
        mine, straight = self.content(name, case), self.content(name, self.straight(name))
        for made in case.iterdir():
            unfinished_store = made.name == "store" and not (made / "store.json").exists()
            if made.name not in ("run", "run.clean") and not made.name.startswith(".") and not unfinished_store:
                paths = {path for path in {*mine, *straight} if path == made.name or path.startswith(f"{made.name}/")}
                assert paths and all(mine.get(path) == straight.get(path) for path in paths), made
        for checkpoint in case.glob("run/checkpoints/step-*"):
            assert find_problems(checkpoint) == []

    def check(self, name: str, action: str, call: int, rank: int = 0) -> str:
        """Lets `call` of `rank` go wrong and the same command go on; returns what was seen: "killed", "ended with an
        error" or "coped"."""
        straight = self.straight(name)
        case = self.place / "case"
        for each in self.place.glob("case*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        ended = self.run(name, case, call=call, action=ACTIONS[action], rank=rank)
        place = f"{name}, {action} at call {call} of rank {rank}: {ended.codes}\n{ended.printed}"
        seen = "coped"
        if ended.codes[rank] == -signal.SIGKILL:
            assert action in ("kill", "torn write"), place
            seen = "killed"
        else:
            assert set(ended.codes) in ({0}, {2}, {74}), place
            assert "Traceback" not in ended.printed, place
            if ended.codes[0]:
                seen = "ended with an error"
                told = [line for line in ended.printed.splitlines() if line.startswith("error: ")]
                assert any(os.strerror(ACTIONS[action][1]) in line for line in told), place
        self.assert_whole(name, case)
        if action == "kill" and seen == "killed":
            spoil_drafts(case)
        if seen != "coped":
            again = self.run(name, case)
            refused = "exists already" if name == "init" else "already exists and is not empty"
            # killed before it could say so; a file keeps its name where only the flush of its folder failed
            made = (seen == "killed" or name == "init") and refused in again.printed
            assert made or set(again.codes) == {0}, f"{place}\nand then\n{again.printed}"
        assert self.content(name, case) == self.content(name, straight), place
        if seen != "coped":
            hidden = [each for each in case.rglob(".*") if "staging" in each.name or each.name.endswith(".tmp")]
            assert not hidden, f"{place}\n{hidden}"
        return seen


def spoil_drafts(case: Path) -> None:
    """Overwrites what a killed process has left under other than final names: nothing may depend on it."""
    for file in case.rglob("*"):
        if file.is_file() and DRAFT.search(file.relative_to(case).as_posix()):
            file.unlink()  # it may be another name of a file that stays
            file.write_bytes(b"spoilt")


def losses(file: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, in the lines of `metrics.jsonl` that are whole; the later one stands."""
    lines = [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"}


def pipeline(folder: Path, place: Path, case: Path) -> Path:
    """Writes into `place` a pipeline from text to an exported GPT in the folder `case`."""
    file = place / "pipeline.json"
    settings = json.loads((folder / "gpt.json").read_text())
    del settings["data"]["train"]
    keys = {
        "corpus": [str(folder / "corpus.txt")], "tokenizer": {"type": "byte_bpe", "vocab_size": 300}, "processes": 1,
        "tokenizer_folder": f"{case}/tokenizer", "store": f"{case}/store", "parameters": settings, "run": f"{case}/run",
        "export": f"{case}/model",
    }  # fmt: skip
    file.write_text(json.dumps(keys))
    return file


@contextmanager
def make_world(folder: Path) -> Iterator[World]:
    """Starts the server in `folder` and makes the commands' corpus, store and parameters."""
    store = toy.make_store(folder / "toy", documents=60, seed=1)
    text = (f"日本の首都は東京です {number} the quick brown fox {number * 7}" for number in range(300))
    (folder / "corpus.txt").write_text("\n\n".join(text), encoding="utf-8")
    checkpoint = {"save_steps": 2, "keep": 2}
    base = {"batch_size": {"-1": 4}, "micro_batch_size": 4, "max_steps": LAST, "checkpoint": checkpoint}
    verbs = {}
    for name, changes in RUNS.items():
        variants = {name: base, f"{name} async": {**base, "checkpoint": {**checkpoint, "async_save": True}}}
        variants |= {f"{each} on two ranks": {**settings, **TWO} for each, settings in variants.items()}
        for variant, settings in variants.items():
            file = folder / f"{variant.replace(' ', '_')}.json"
            file.write_text(json.dumps(toy.parameters(store, **{**settings, **changes})))
            verbs[f"train {variant}"] = Verb(("train", str(file), "--out", "CASE/run"), 1 + ("two" in variant))
    verbs["resume bert"] = verbs["train bert"]
    corpus, tokenizer = str(folder / "corpus.txt"), str(folder / "tokenizer_train.straight.0/tokenizer")
    store, run = str(folder / "prepare.straight.0/store"), str(folder / "train_bert.straight.0/run")
    gpt, model = str(folder / "train_gpt.straight.0/run"), str(make_model(folder / "model"))
    examples = write(folder / "examples.jsonl", classified(16, 1))
    alone = ("--processes", "1")
    verbs |= {
        "tokenizer train": Verb(
            ("tokenizer", "train", corpus, "--type", "byte_bpe", "--vocab-size", "300", *alone,
             "--out", "CASE/tokenizer"),
        ),
        "prepare": Verb(("prepare", corpus, "--tokenizer", tokenizer, *alone, "--out", "CASE/store")),
        "store merge": Verb(("store", "merge", store, store, "--out", "CASE/merged")),
        "export": Verb(("export", run, "--out", "CASE/model")),
        "export megatron": Verb(("export", gpt, "--format", "megatron", "--out", "CASE/model")),
        "import": Verb(
            ("import", "megatron", str(folder / "export_megatron.straight.0/model"), "--out", "CASE/model")
        ),
        "fork": Verb(("fork", f"{run}@4", "--out", "CASE/new", "--set", "seed=7")),
        "average": Verb(("average", run, "--last", "2", "--out", "CASE/model")),
        "upload": Verb(("upload", model, "--name", "somebody/model", "--dry-run", "CASE/published")),
        "evaluate": Verb(
            ("evaluate", model, "--corpus", corpus, "--measure", "pseudo-perplexity", "--limit", "2",
             "--out", "CASE/scores.json"),
        ),
        "finetune": Verb(
            ("finetune", model, "--train", str(examples), "--eval", str(examples), "--task", "classification",
             "--epochs", "1", "--out", "CASE/tuned"),
        ),
        "init": Verb(
            ("init", corpus, "--yes", "--goal", "try", "--no-measure", "--work", str(folder / "work"),
             "--out", "CASE/pipeline.json"),
        ),
        "report": Verb(("report", run, "--out", "CASE/report.html")),
        "run": Verb(()),
    }  # fmt: skip
    with file_faults.start(folder) as faults:
        yield World(faults, folder, verbs, folder)


@contextmanager
def workers(world: World, count: int) -> Iterator[list[World]]:
    """Worlds that try commands at the same time: each has a server and a place of its own."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            place = world.folder / f"worker{number}"
            place.mkdir()
            made.append(replace(world, faults=stack.enter_context(file_faults.start(place)), place=place))
        yield made


ONE_RANK = (
    "train bert",
    "resume bert",
    "tokenizer train",
    "prepare",
    "store merge",
    "export",
    "import",
    "fork",
    "average",
    "upload",
    "evaluate",
    "finetune",
    "init",
    "report",
    "run",
)
EVERY = [
    *((name, 0) for name in (*ONE_RANK, "export megatron")),
    *((f"train {kind}{mode}", 0) for kind in RUNS for mode in ("", " async") if kind + mode != "bert"),
    *((f"train {kind}{mode} on two ranks", rank) for kind in RUNS for mode in ("", " async") for rank in (0, 1)),
]
"""Commands and the rank whose calls go wrong."""


def instants(world: World, name: str, action: str) -> list[int]:
    """The calls that can go wrong in this way, from 1."""
    kinds = world.calls(name)
    return [number for number, kind in enumerate(kinds, 1) if action != "torn write" or kind == "write"]
