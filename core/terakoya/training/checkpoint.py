"""Checkpoints that are whole or not there: staged, hashed, described by a manifest written last, renamed into place.

    RUN/checkpoints/step-00001000/manifest.json   what the checkpoint is, and every file with size and SHA-256
                                  state/          fp32 parameters, optimizer state: what resume reads
                                  model/          a Transformers folder, never read by resume
                                  adapter/        with `lora` the adapters in peft's format, never read by resume
                                  tokenizer/

Tensors are safetensors, everything else JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from terakoya.errors import UserError
from terakoya.training.distributed import Connection
from terakoya.training.engine import Engine, saved_values

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")
SHARD_BYTES = 4 << 30
MINIMUM_KEPT = 2


def folder_name(step: int) -> str:
    """The name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def committed(checkpoints: Path) -> list[tuple[int, Path]]:
    """The checkpoints under their final names, oldest first; links and strangers are passed over."""
    if not checkpoints.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in checkpoints.iterdir()
        if (match := NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found)


# --------------------------------------------------------------------------------------------------------- writing


def save(
    checkpoints: Path,
    step: int,
    connection: Connection,
    engine: Engine,
    *,
    facts: Mapping[str, Any],
    write_models: Callable[[Path], None],
    tokenizer_folder: Path,
    keep: int,
) -> Path:
    """Writes and commits the checkpoint of `step`, then prunes; every rank calls it and returns together.

    Args:
        facts: what the manifest says beside the files; JSON.
        write_models: writes what is read without us beside `state/`, which is there, on rank 0 alone.
        keep: how many checkpoints stay, at least `MINIMUM_KEPT`.

    Raises:
        UserError: on every rank, if writing failed on any; nothing committed is touched.
    """
    staging = checkpoints / f".staging-{folder_name(step)}"
    final = checkpoints / folder_name(step)
    error: OSError | None = None
    try:
        if connection.is_main:
            shutil.rmtree(staging, ignore_errors=True)
            (staging / "state").mkdir(parents=True)
        connection.barrier()
        _write_state(staging / "state", connection, engine)
        if connection.is_main:
            write_models(staging)
            shutil.copytree(tokenizer_folder, staging / "tokenizer")
            _commit(staging, final, {"format": FORMAT, "step": step, **facts})
            prune(checkpoints, keep)
    except OSError as failure:
        error = failure
        if connection.is_main:
            shutil.rmtree(staging, ignore_errors=True)
    connection.together(f"saving {final}", error)
    return final


def _write_state(folder: Path, connection: Connection, engine: Engine) -> None:
    """Writes parameters and optimizer state, in shards of at most `SHARD_BYTES`; gathering is collective, writing not.

    A failed write is raised only after the gathering, so that no rank is left waiting.
    """
    failure: OSError | None = None
    for name, values in (("model", engine.parameters()), ("optimizer", engine.optimizer_state())):
        pending: dict[str, Tensor] = {}
        shard = 0
        size = 0
        for key, value in values:
            if not connection.is_main or failure:
                continue
            pending[key] = value.detach()
            size += value.numel() * value.element_size()
            if size >= SHARD_BYTES:
                failure = _write_shard(folder / f"{name}-{shard:05d}.safetensors", pending)
                pending, size, shard = {}, 0, shard + 1
        if connection.is_main and not failure and (pending or not shard):
            failure = _write_shard(folder / f"{name}-{shard:05d}.safetensors", pending)
    if failure:
        raise failure


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> OSError | None:
    """Writes one safetensors file; returns what went wrong with the disk, if anything did."""
    try:
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, path)
    except OSError as error:
        return error
    except SafetensorError as error:  # how safetensors reports a full disk
        return OSError(f"{path}: {error}")
    return None


def _commit(staging: Path, final: Path, facts: Mapping[str, Any]) -> None:
    """Makes every file durable, writes the manifest last and renames `staging` to `final`."""
    files = {}
    for path in sorted(staging.rglob("*")):
        if path.is_file():
            files[path.relative_to(staging).as_posix()] = {
                "size": path.stat().st_size,
                "sha256": _sha256(path, sync=True),
            }
    manifest = staging / "manifest.json"
    manifest.write_text(json.dumps({**facts, "files": files}, indent=1, ensure_ascii=False), encoding="utf-8")
    _sha256(manifest, sync=True)
    for folder in [*(path for path in staging.rglob("*") if path.is_dir()), staging]:
        sync_folder(folder)
    if final.exists():
        shutil.rmtree(final)  # an older save of the same step, from before a resume at an earlier one
    staging.rename(final)
    sync_folder(final.parent)


def _sha256(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Removes all but the newest `keep` checkpoints; returns the removed. Never below two whose files all have their
    size, so that a checkpoint damaged since is not what is left."""
    sound = [path for _, path in committed(checkpoints) if not problems(path, hashes=False)]
    kept = set(sound[-max(keep, MINIMUM_KEPT) :])
    if len(kept) < MINIMUM_KEPT:
        return []
    oldest_kept = min(int(NAME.fullmatch(path.name)[1]) for path in kept)  # type: ignore[index]
    removed = []
    for step, path in committed(checkpoints):
        if step < oldest_kept:
            doomed = path.with_name(f".removing-{path.name}")
            path.rename(doomed)  # a half removed folder must not bear a checkpoint's name
            shutil.rmtree(doomed)
            removed.append(path)
    return removed


# --------------------------------------------------------------------------------------------------------- reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint `folder`.

    Raises:
        UserError: there is none, or it cannot be read, or its format is of a newer version.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint's manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: expected checkpoint format {FORMAT}; written by another version of terakoya?")
    return manifest


def problems(folder: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with the checkpoint `folder`: nothing, if it is whole. Checks names, sizes and, with `hashes`,
    contents."""
    try:
        files = read_manifest(folder)["files"]
    except (UserError, KeyError) as error:
        return [str(error)]
    found = []
    for name, facts in files.items():
        path = folder / name
        if ".." in Path(name).parts or not path.is_file() or path.is_symlink():
            found.append(f"{name}: missing")
        elif path.stat().st_size != facts["size"]:
            found.append(f"{name}: {path.stat().st_size} bytes, expected {facts['size']}")
        elif hashes and _sha256(path) != facts["sha256"]:
            found.append(f"{name}: content changed")
    return found


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what was said on the way there.

    What a killed process left is removed; a damaged checkpoint is moved to `quarantine/`. One process calls this.
    """
    said = []
    if checkpoints.is_dir():
        for leftover in sorted([*checkpoints.glob(".staging-*"), *checkpoints.glob(".removing-*")]):
            shutil.rmtree(leftover)
            said.append(f"removed {leftover.name}, left by an interrupted save")
    for _, folder in reversed(committed(checkpoints)):
        wrong = problems(folder)
        if not wrong:
            return folder, said
        place = checkpoints / "quarantine" / folder.name
        place.parent.mkdir(exist_ok=True)
        while place.exists():
            place = place.with_name(place.name + "+")
        folder.rename(place)
        said.append(f"{folder.name} is damaged ({'; '.join(wrong[:3])}); moved to {place}")
    return None, said


class State:
    """The tensors in a checkpoint's `state/`, read one at a time."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Opens `kind`, "model" or "optimizer", of the checkpoint `folder`."""
        self.folder = folder
        self.files = [safe_open(path, "pt") for path in sorted((folder / "state").glob(f"{kind}-*.safetensors"))]
        self.where = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self.where)

    def __call__(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU.

        Raises:
            UserError: the checkpoint has no such tensor: it is of another model.
        """
        if name not in self.where:
            raise UserError(f"{self.folder}: has no tensor {name}; it was saved from another architecture or objective")
        tensor: Tensor = self.where[name].get_tensor(name)
        return tensor


def load(folder: Path, engine: Engine) -> None:
    """Sets parameters and optimizer of `engine` from the checkpoint `folder`; collective."""
    model = State(folder, "model")
    engine.load_parameters(model)
    optimizer = State(folder, "optimizer")
    engine.load_optimizer_state(optimizer, optimizer.names())


def load_module(folder: Path, module: torch.nn.Module) -> None:
    """Sets the parameters of a plain `module` from the checkpoint `folder`, in this process alone."""
    state = State(folder, "model")
    values = dict(saved_values(module))
    surplus = state.names() - values.keys()
    if surplus:
        raise UserError(f"{folder}: has tensors this model does not know: {', '.join(sorted(surplus)[:5])}")
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(state(name))
