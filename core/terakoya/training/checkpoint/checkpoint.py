"""Checkpoints that are whole or not there: staged, hashed, described by a manifest written last, renamed into place.

    RUN/checkpoints/step-00001000/manifest.json   what the checkpoint is, and every file with size and SHA-256
                                  state/          fp32 parameters, optimizer state: what resume reads
                                  model/          a Transformers folder, never read by resume
                                  adapter/        with `lora` the adapters in peft's format, never read by resume
                                  tokenizer/

Every rank writes its own part of `state/` (see `checkpoint_state`), flushes and hashes it; rank 0 writes the rest.
Tensors are safetensors, everything else JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from terakoya.atomic_files import sync_folder
from terakoya.errors import UserError
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.state import ShardSource, file_facts
from terakoya.training.distributed.all_ranks import Shutdown, run_on_all_ranks
from terakoya.training.distributed.context import DistributedContext

FORMAT = 2
READ = (1, 2)
"""Formats that are read. In the first rank 0 wrote all of `state/`, as whole tensors: the second without pieces."""
NAME = re.compile(r"step-(\d{8,})")
MINIMUM_KEPT = 2
HASHING_THREADS = 8


def folder_name(step: int) -> str:
    """The name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
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
    context: DistributedContext,
    shard_source: ShardSource,
    *,
    facts: Mapping[str, Any],
    write_models: Callable[[Path], None],
    tokenizer_folder: Path,
    keep: int,
    shutdown: threading.Event | None = None,
) -> Path:
    """Writes and commits the checkpoint of `step`, then prunes; every rank calls it and returns together.

    Args:
        shard_source: the engine, or a copy of its state: what of it this process writes.
        facts: what the manifest says beside the files; JSON.
        write_models: writes what is read without us beside `state/`, which is there, on rank 0 alone.
        keep: how many checkpoints stay, at least `MINIMUM_KEPT`.
        shutdown: set when this process is about to leave and the save is to end.

    Raises:
        UserError: on every rank, if writing failed on any; nothing committed is touched.
        Shutdown: `shutdown` is set.
    """
    staging = checkpoints / f".staging-{folder_name(step)}"
    final = checkpoints / folder_name(step)

    def begin() -> None:
        if context.is_main:
            shutil.rmtree(staging, ignore_errors=True)
            (staging / "state").mkdir(parents=True)

    def finish(written: Mapping[str, Any]) -> None:
        if context.is_main:
            lacking = checkpoint_state.incomplete(staging)
            assert not lacking, f"{lacking[:5]} were not written once: processes do not agree who writes what"
            write_models(staging)
            shutil.copytree(tokenizer_folder, staging / "tokenizer")
            if shutdown is not None and shutdown.is_set():
                raise Shutdown  # the run's lock may be somebody else's by now
            _commit(staging, final, {"format": FORMAT, "step": step, **facts}, written)
            prune(checkpoints, keep)

    together = partial(run_on_all_ranks, context, f"saving {final}", shutdown=shutdown)
    try:
        together(begin)
        parts = together(lambda: checkpoint_state.write(staging / "state", context.rank, shard_source))
        written = {f"state/{name}": each for part in parts for name, each in part.items()}
        together(lambda: finish(written))
    except UserError:
        if context.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def _commit(staging: Path, final: Path, facts: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Makes every file durable but those that are `written` so, writes the manifest last and renames `staging`."""
    files = dict(written)
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_file() and name not in files:
            files[name] = file_facts(path, sync=True)
    manifest = staging / "manifest.json"
    text = json.dumps({**facts, "files": dict(sorted(files.items()))}, indent=1, ensure_ascii=False)
    manifest.write_text(text, encoding="utf-8")
    file_facts(manifest, sync=True)
    for folder in [*(path for path in staging.rglob("*") if path.is_dir()), staging]:
        sync_folder(folder)
    if final.exists():
        shutil.rmtree(final)  # an older save of the same step, from before a resume at an earlier one
    staging.rename(final)
    sync_folder(final.parent)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Removes all but the newest `keep` checkpoints; returns the removed. Never below two whose files all have their
    size, so that a checkpoint damaged since is not what is left."""
    sound = [path for _, path in list_checkpoints(checkpoints) if not find_problems(path, hashes=False)]
    kept = set(sound[-max(keep, MINIMUM_KEPT) :])
    if len(kept) < MINIMUM_KEPT:
        return []
    oldest_kept = min(int(NAME.fullmatch(path.name)[1]) for path in kept)  # type: ignore[index]
    removed = []
    for step, path in list_checkpoints(checkpoints):
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
    if not isinstance(manifest, dict) or manifest.get("format") not in READ:
        raise UserError(f"{path}: expected checkpoint format {FORMAT}; written by another version of terakoya?")
    return manifest


def find_problems(folder: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with the checkpoint `folder`: nothing, if it is whole. Checks names, sizes and, with `hashes`,
    contents."""
    try:
        files = read_manifest(folder)["files"]
    except (UserError, KeyError) as error:
        return [str(error)]

    def wrong(name: str) -> str | None:
        path, expected = folder / name, files[name]
        if ".." in Path(name).parts or not path.is_file() or path.is_symlink():
            return f"{name}: missing"
        if path.stat().st_size != expected["size"]:
            return f"{name}: {path.stat().st_size} bytes, expected {expected['size']}"
        if hashes and file_facts(path)["sha256"] != expected["sha256"]:
            return f"{name}: content changed"
        return None

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return [text for text in pool.map(wrong, files) if text is not None]


def recover_newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what was said on the way there.

    What a killed process left is removed; a damaged checkpoint is moved to `quarantine/`. One process calls this.
    """
    said = []
    if checkpoints.is_dir():
        for leftover in sorted([*checkpoints.glob(".staging-*"), *checkpoints.glob(".removing-*")]):
            shutil.rmtree(leftover)
            said.append(f"removed {leftover.name}, left by an interrupted save")
    for _, folder in reversed(list_checkpoints(checkpoints)):
        wrong = find_problems(folder)
        if not wrong:
            return folder, said
        place = checkpoints / "quarantine" / folder.name
        place.parent.mkdir(exist_ok=True)
        while place.exists():
            place = place.with_name(place.name + "+")
        folder.rename(place)
        said.append(f"{folder.name} is damaged ({'; '.join(wrong[:3])}); moved to {place}")
    return None, said
