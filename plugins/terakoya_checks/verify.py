"""Reads all of a run, a checkpoint, a token store or a model folder, and recomputes what can be recomputed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.components.tokenizer import load_tokenizer
from terakoya.conversion.export import load_model
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of
from terakoya.json_settings import read_json
from terakoya.places import as_written, place_of
from terakoya.runs import metrics
from terakoya.runs.checkpoints import (
    MANIFEST,
    RemovedError,
    find_problems,
    list_checkpoints,
    read_manifest,
    reading,
    while_kept,
)
from terakoya.runs.finding import PERMANENT

if TYPE_CHECKING:
    from torch import Tensor

MODEL_PARTS = ("generator", "discriminator")


@dataclass
class Findings:
    """What was read, a line for each thing, and what is wrong with it, a line for each problem, in the folders
    `damaged`."""

    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)

    def add(self, folder: Path, description: str, problems: Iterable[str]) -> None:
        """Adds the `problems` of `folder`, or its `description` if there are none."""
        shown = as_written(folder)
        lines = [f"{shown}: {problem}" for problem in problems]
        self.problems += lines
        self.damaged += [folder] if lines else []
        self.checked += [] if lines else [f"{shown}: {description}"]

    def has_copies_alone(self) -> bool:
        """Returns whether all that is damaged is checkpoints that a run keeps outside of `checkpoints/`."""
        return bool(self.damaged) and all(
            (folder / MANIFEST).exists() and folder.parent.name != "checkpoints" for folder in self.damaged
        )


def verify(folder: Path) -> Findings:
    """Reads all of `folder`: a run, one of its checkpoints, a token store or a model folder. Changes nothing. Of a run
    or a store in another place, it compares the hashes of all files. Raises UserError if `folder` is none of these, or
    a file cannot be read now."""
    findings = Findings()
    if not (place := place_of(folder)).is_local:
        for name, description, problems in place.verify():
            findings.add(Path(name), description, problems)
        return findings
    if not folder.is_dir():
        raise _unknown(folder)
    model_folders = folder, *(folder / part for part in MODEL_PARTS)
    with reading(folder):
        if (folder / "store.json").is_file():
            _verify_store(folder, findings)
        elif (folder / MANIFEST).is_file():
            _verify_checkpoint(folder, findings)
        elif kind_of(folder) == "run":
            _verify_run(folder, findings)
        elif models := [each for each in model_folders if (each / "config.json").is_file()]:
            for model in models:
                _verify_model(model, findings)
        else:
            raise _unknown(folder)
    return findings


def _unknown(folder: Path) -> UserError:
    there = describe_found(folder, "run")
    return UserError(f"{folder}: expected a run, a checkpoint, a token store or a model folder, got {there}")


def _verify_store(folder: Path, findings: Findings) -> None:
    from terakoya.store.token_store import count_store
    from terakoya_checks.verify_store import verify as find_faults

    faults = find_faults(folder)
    findings.problems += faults
    if not faults:
        findings.checked.append(f"{folder}: a sound store; {count_store(folder).tokens:,} tokens")


def _verify_run(folder: Path, findings: Findings) -> None:
    checkpoints = [path for _, path in list_checkpoints(folder / "checkpoints")]
    kept = [path for _, path in list_checkpoints(folder / PERMANENT)]
    kept += sorted(path for path in folder.glob("[!.]*") if (path / MANIFEST).is_file())  # such as model-best
    for path in (*checkpoints, *kept):
        _verify_checkpoint(path, findings)
    if not checkpoints:
        findings.problems.append(f"{folder}: has no checkpoint")
    if (folder / metrics.FILE).is_file():
        written = metrics.read(folder)
        problems = [f"line {number} of {metrics.FILE} is damaged" for number in written.damaged]
        findings.add(folder, f"{metrics.FILE} has {len(written.records):,} records", problems)


def _verify_checkpoint(folder: Path, findings: Findings) -> None:
    """Checks manifest, files, and that the tensors of `state/` are complete and finite."""
    inode = _inode(folder)
    count, size, files = 0, 0, {}
    try:
        with while_kept(folder):
            problems = find_problems(folder)
            if not problems:
                files = read_manifest(folder)["files"]
                size = sum(facts["size"] for facts in files.values())
                count, problems = _check_tensors(folder)
    except RemovedError:
        return
    if problems and _inode(folder) != inode:
        return  # the run, which continues, has removed it, or has kept a better one there
    findings.add(folder, f"whole; {len(files):,} files, {size:,} bytes; {count:,} tensors, all finite", problems)


def _check_tensors(folder: Path) -> tuple[int, list[str]]:
    """Reads every tensor of the checkpoint `folder`. Returns their number, and a line for each that is not sound."""
    from terakoya.training.checkpoint.state import KINDS, SavedState, is_finite

    problems = []
    states = [SavedState(folder, kind) for kind in KINDS]
    for state in states:
        for name in sorted(state.names()):
            if not state.is_whole(name):
                problems.append(f"state/: a part of {name} is missing")
            elif not all(is_finite(shard.read()) for shard in state.shards[name]):
                problems.append(f"state/: {name} is not finite")
    return sum(len(state.names()) for state in states), problems


def _inode(folder: Path) -> int | None:
    return folder.stat().st_ino if folder.is_dir() else None


def _verify_model(folder: Path, findings: Findings) -> None:
    """Checks that a Transformers folder loads, that its tokenizer does and fits it, and that its weights are finite.

    Files that an export wrote have their recorded hashes. Other folders have none to compare with: a number in them
    that changed to another number is not found.
    """
    from terakoya.toolkit.formats import folder_digests
    from terakoya.toolkit.formats.model_folder import silence_transformers

    try:
        config = read_json(folder / "config.json")
        recorded = folder_digests.read(folder)
        count = 0
        problems = list(folder_digests.find_changes(folder) if recorded else folder_digests.find_partial_files(folder))
        if not problems:
            count, problems = _check_weights(folder)
        if not problems and "auto_map" not in config:
            with silence_transformers():
                load_model(folder)
        if not problems:
            problems, tokenizer = _check_tokenizer(folder, config.get("vocab_size"))
            hashed = "no recorded hashes" if recorded is None else f"{len(recorded)} files with their recorded hashes"
            findings.add(folder, f"{hashed}; a model; {count:,} tensors, all finite; {tokenizer}", problems)
            return
    except UserError as error:
        problems = [str(error).removeprefix(f"{folder}: ")]
    findings.add(folder, "", problems)


def _check_weights(folder: Path) -> tuple[int, list[str]]:
    """Returns the number of tensors in the safetensors files of `folder`, and what is wrong with them."""
    from safetensors import SafetensorError, safe_open

    from terakoya.training.checkpoint.state import is_finite

    names: set[str] = set()
    problems = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    names.add(name)
                    value: Tensor = file.get_tensor(name)
                    if not is_finite(value):
                        problems.append(f"{path.name}: {name} is not finite")
        except SafetensorError as error:
            problems.append(f"{path.name}: cannot be loaded: {error}")
    if not names and not problems:
        problems.append("has no weights in *.safetensors")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(read_json(index).get("weight_map", {}).keys() - names)
        problems += [f"{index.name}: {name} is in no file" for name in missing]
    return len(names), problems


def _check_tokenizer(folder: Path, vocabulary_size: int | None) -> tuple[list[str], str]:
    """Returns what is wrong with the tokenizer in `folder`, if there is one, and a description of it."""
    if not (folder / "tokenizer_config.json").is_file():
        return [], "no tokenizer"
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        return [f"its tokenizer cannot be loaded: {error}"], ""
    size = len(tokenizer)
    if vocabulary_size is not None and size > vocabulary_size:
        return [f"its tokenizer has {size:,} pieces, its embeddings are for {vocabulary_size:,}"], ""
    return [], f"a tokenizer of {size:,} pieces"
