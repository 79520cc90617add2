"""Writes checkpoints that are complete or absent: staged, hashed, described by a manifest, then renamed into place.

    RUN/checkpoints/step-00001000/manifest.json   facts about the run, and the size and SHA-256 of every file
                                  state/          fp32 parameters and optimizer state: what a resumed run reads
                                  model/          a Transformers folder, never read by resume
                                  adapter/        with `lora` the adapters in peft's format, never read by resume
                                  tokenizer/

Every rank writes, flushes and hashes its own shards of `state/` (see `state.py`); rank 0 writes everything else.
Tensors are safetensors, everything else JSON; nothing is ever unpickled.

See docs/design/checkpoints.md.
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
READABLE_FORMATS = (1, 2)
"""In format 1, rank 0 wrote all of `state/` as whole tensors: format 2 without shards."""
NAME = re.compile(r"step-(\d{8,})")
MINIMUM_KEPT = 2
"""Pruning keeps at least so many checkpoints."""
HASHING_THREADS = 8


def folder_name(step: int) -> str:
    """Returns the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of the checkpoints under their final names, oldest first; skips links and other files."""
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
    source: ShardSource,
    *,
    facts: Mapping[str, Any],
    write_models: Callable[[Path], None],
    tokenizer_folder: Path,
    keep: int,
    shutdown: threading.Event | None = None,
) -> Path:
    """Writes and commits the checkpoint of `step`, then prunes old ones; collective: all ranks return together.

    Args:
        source: the engine, or a snapshot of its state: the shards that this process writes.
        facts: JSON values of the manifest, apart from its files.
        write_models: called on rank 0 with the staging folder, whose `state/` is complete: writes the folders that
            other programs read.
        keep: how many checkpoints stay, at least `MINIMUM_KEPT`.
        shutdown: set when this process is about to leave and must abandon the save.

    Returns:
        the folder of the checkpoint.

    Raises:
        UserError: on every rank, if writing failed on any; committed checkpoints are not touched.
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
            incomplete = checkpoint_state.incomplete_tensors(staging)
            assert not incomplete, f"{incomplete[:5]} were not written once: processes do not agree who writes what"
            write_models(staging)
            shutil.copytree(tokenizer_folder, staging / "tokenizer")
            if shutdown is not None and shutdown.is_set():
                raise Shutdown  # another process may hold the run's lock by now
            _commit(staging, final, {"format": FORMAT, "step": step, **facts}, written)
            prune(checkpoints, keep)

    on_all_ranks = partial(run_on_all_ranks, context, f"saving {final}", shutdown=shutdown)
    try:
        on_all_ranks(begin)
        files_of_ranks = on_all_ranks(lambda: checkpoint_state.write(staging / "state", context.rank, source))
        written = {f"state/{name}": facts for files in files_of_ranks for name, facts in files.items()}
        on_all_ranks(lambda: finish(written))
    except UserError:
        if context.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def _commit(staging: Path, final: Path, facts: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Flushes every file to disk that is not among those `written`, writes the manifest last and renames `staging`."""
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
    """Removes all but the newest `keep` checkpoints and returns the removed folders.

    Always keeps `MINIMUM_KEPT` checkpoints whose files have the right sizes, so that a damaged checkpoint is never the
    only one that remains.
    """
    sound = [path for _, path in list_checkpoints(checkpoints) if not find_problems(path, hashes=False)]
    kept = set(sound[-max(keep, MINIMUM_KEPT) :])
    if len(kept) < MINIMUM_KEPT:
        return []
    oldest_kept = min(int(NAME.fullmatch(path.name)[1]) for path in kept)  # type: ignore[index]
    removed = []
    for step, path in list_checkpoints(checkpoints):
        if step < oldest_kept:
            removing = path.with_name(f".removing-{path.name}")
            path.rename(removing)  # a half removed folder must not have the name of a checkpoint
            shutil.rmtree(removing)
            removed.append(path)
    return removed


# --------------------------------------------------------------------------------------------------------- reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of the checkpoint `folder`.

    Raises:
        UserError: the manifest is missing, unreadable, or of a newer format.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint's manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in READABLE_FORMATS:
        raise UserError(f"{path}: expected checkpoint format {FORMAT}; written by another version of terakoya?")
    return manifest


def find_problems(folder: Path, *, hashes: bool = True) -> list[str]:
    """Returns what is wrong with the checkpoint `folder`, a line per problem; none if it is intact.

    Checks names, sizes and, with `hashes`, contents.
    """
    try:
        files = read_manifest(folder)["files"]
    except (UserError, KeyError) as error:
        return [str(error)]

    def find_problem(name: str) -> str | None:
        path, expected = folder / name, files[name]
        if ".." in Path(name).parts or not path.is_file() or path.is_symlink():
            return f"{name}: missing"
        if path.stat().st_size != expected["size"]:
            return f"{name}: {path.stat().st_size} bytes, expected {expected['size']}"
        if hashes and file_facts(path)["sha256"] != expected["sha256"]:
            return f"{name}: content changed"
        return None

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return [problem for problem in pool.map(find_problem, files) if problem is not None]


def recover_newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Cleans up after interrupted saves and returns the newest intact checkpoint, if any, and messages for the user.

    Removes leftovers of killed processes and moves damaged checkpoints to `quarantine/`. Only one process may call it.
    """
    messages = []
    if checkpoints.is_dir():
        for leftover in sorted([*checkpoints.glob(".staging-*"), *checkpoints.glob(".removing-*")]):
            shutil.rmtree(leftover)
            messages.append(f"removed {leftover.name}, left by an interrupted save")
    for _, folder in reversed(list_checkpoints(checkpoints)):
        problems = find_problems(folder)
        if not problems:
            return folder, messages
        quarantine = checkpoints / "quarantine" / folder.name
        quarantine.parent.mkdir(exist_ok=True)
        while quarantine.exists():
            quarantine = quarantine.with_name(quarantine.name + "+")
        folder.rename(quarantine)
        messages.append(f"{folder.name} is damaged ({'; '.join(problems[:3])}); moved to {quarantine}")
    return None, messages
