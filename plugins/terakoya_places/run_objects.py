"""A run in an object store: which of its checkpoints are whole there, how one is written, and how one is fetched.

    ADDRESS/checkpoints/step-00001000/...             a checkpoint; its manifest.json is written last and removed first
    ADDRESS/parameters.json, metrics.jsonl, ...       the other files of the run's folder
    ADDRESS/writer.json                               the process that writes here; the newest one alone may

See docs/design/object-stores.md.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from terakoya.atomic_files import FileFacts, commit_folder
from terakoya.errors import UserError
from terakoya.runs import metrics
from terakoya.runs.checkpoints import KEEP_BEFORE, MANIFEST, NAME, DamagedError, read_manifest
from terakoya.runs.files import MACHINE_FILES
from terakoya_places.object_folder import THREADS, ObjectFolder

WRITER = "writer.json"
CHECKPOINTS = "checkpoints"
OWN_FILES = (*MACHINE_FILES, WRITER)

Sizes = Mapping[str, int]
"""The sizes of the objects of a run, by name."""


def find_committed(sizes: Sizes) -> list[str]:
    """Returns the names of the folders among the objects that have a manifest, such as `checkpoints/step-00001000`."""
    return [str(PurePosixPath(name).parent) for name in sizes if name.endswith(f"/{MANIFEST}")]


def checkpoint_steps(names: Iterable[str]) -> dict[int, str]:
    """Returns those of the folders `names` that are `checkpoints/step-N`, by step."""
    found = {}
    for name in names:
        parent, _, last = name.rpartition("/")
        if parent == CHECKPOINTS and (match := NAME.fullmatch(last)):
            found[int(match[1])] = name
    return dict(sorted(found.items()))


def is_own(path: PurePosixPath) -> bool:
    """Whether `path`, relative to the run's folder, is not mirrored: drafts, locks, requests, damaged checkpoints."""
    return (
        any(part.startswith(".") for part in path.parts)
        or path.name in OWN_FILES
        or path.parts[:2] == (CHECKPOINTS, "quarantine")
    )


def has_run(sizes: Sizes) -> bool:
    """Returns whether the objects are of a run."""
    return metrics.FILE in sizes or bool(checkpoint_steps(find_committed(sizes)))


# --------------------------------------------------------------------------------------------------------- to there


class SentOtherwise(UserError):  # noqa: N818 - what was found
    """The store holds something else than what was sent to it."""


def send_checkpoint(store: ObjectFolder, folder: Path, name: str, sizes: Sizes) -> None:
    """Writes the checkpoint `folder` as `name`, manifest last.

    Each file is read back and compared with the manifest's hash before the manifest is written. A checkpoint that is
    there under this name loses its manifest first. What is there already, in the right size and with the right hash,
    is not sent again; `sizes` are those of the objects there.

    Raises:
        DamagedError: the checkpoint here is damaged.
        SentOtherwise: something else arrived than was sent.
        FileNotFoundError: the checkpoint was pruned here in the meantime.
        TemporaryFailure: the store does not answer.
    """
    content = (folder / MANIFEST).read_bytes()
    files = read_manifest(folder)["files"]
    there = {each: size for each, size in sizes.items() if each.startswith(f"{name}/")}
    wanted = {f"{name}/{each}" for each in files}
    store.remove([f"{name}/{MANIFEST}", *(each for each in there if each not in wanted)])

    def send(file: str) -> None:
        target, expected = f"{name}/{file}", files[file]
        if there.get(target) == expected["size"] and store.facts(target).model_dump() == expected:
            return
        store.upload(folder / file, target)
        if store.facts(target).model_dump() != expected:
            if FileFacts.of(folder / file).model_dump() != expected:
                raise DamagedError(f"{folder}: {file}: content changed")
            raise SentOtherwise(f"{store}/{target}: another content arrived than was sent")

    with ThreadPoolExecutor(THREADS, "mirror") as pool:
        list(pool.map(send, files))
    store.write(f"{name}/{MANIFEST}", content)
    if store.read(f"{name}/{MANIFEST}") != content:
        store.remove([f"{name}/{MANIFEST}"])
        raise SentOtherwise(f"{store}/{name}/{MANIFEST}: another content arrived than was sent")


def remove_checkpoint(store: ObjectFolder, name: str, sizes: Sizes) -> None:
    """Removes the checkpoint `name`, its manifest first, so that what is half removed is none."""
    store.remove([f"{name}/{MANIFEST}", *(each for each in sizes if each.startswith(f"{name}/"))])


def find_problems(store: ObjectFolder, name: str) -> list[str]:
    """Reads the whole checkpoint `name` there; returns how it is damaged, a line per problem, none if it is whole."""
    with tempfile.TemporaryDirectory() as scratch:
        store.download(f"{name}/{MANIFEST}", Path(scratch) / MANIFEST)
        try:
            files = read_manifest(Path(scratch))["files"]
        except DamagedError as error:
            return [str(error).replace(scratch, str(store))]
    return store.compare({file: FileFacts(**facts) for file, facts in files.items()}, f"{name}/")


# ------------------------------------------------------------------------------------------------------- from there


def fetch_newest(
    store: ObjectFolder, run: Path, sizes: Sizes, *, after: int = -1
) -> tuple[Path | None, dict[str, str]]:
    """Fetches the newest whole checkpoint of a step above `after` into the run's folder, and the run's other files
    before it appears there: whoever finds it has the log that belongs to it. With it comes the older one to which the
    run may have to go back. Returns its folder there, None where the store has none, and what is wrong with each that
    is damaged, by name.

    Raises:
        TemporaryFailure: the store does not answer.
        UserError: a newer version of terakoya wrote one of them.
    """
    damaged: dict[str, str] = {}
    steps = checkpoint_steps(find_committed(sizes))

    def fetch(step: int, before: Callable[[Mapping[str, Any]], None]) -> Path | None:
        name = steps[step]
        try:
            return fetch_checkpoint(store, name, run / name, before=before)
        except (DamagedError, FileNotFoundError) as error:
            damaged[name] = str(error)
            return None

    def fetch_rest(manifest: Mapping[str, Any]) -> None:
        fetch_files(store, run, sizes)
        back_to = manifest.get(KEEP_BEFORE)
        for older in reversed([step for step in steps if back_to is not None and step <= back_to]):
            if (run / steps[older]).is_dir() or fetch(older, lambda _: None) is not None:
                break

    for step in reversed(steps):
        if step <= after:
            break
        if (folder := fetch(step, fetch_rest)) is not None:
            return folder, damaged
    return None, damaged


def fetch_run(store: ObjectFolder, folder: Path, say: Callable[[str], None]) -> None:
    """Fetches the run into `folder`: its newest whole checkpoint, the permanent ones and the best; `say` receives which
    of these are left out as they are damaged. Raises UserError where no checkpoint is whole."""
    sizes = store.sizes()
    fetched, damaged = fetch_newest(store, folder, sizes)
    if fetched is None:
        raise UserError(
            f"{store}: expected a whole checkpoint, found none:\n  "
            + "\n  ".join([*damaged.values()] or ["none there"])
        )
    committed = find_committed(sizes)
    for name in sorted(set(committed) - set(checkpoint_steps(committed).values())):
        try:
            fetch_checkpoint(store, name, folder / name)
        except (DamagedError, FileNotFoundError) as error:
            say(f"warning: {store}/{name} is left out, as it is not whole: {error}")


def fetch_checkpoint(
    store: ObjectFolder, name: str, folder: Path, *, before: Callable[[Mapping[str, Any]], None] = lambda manifest: None
) -> Path:
    """Fetches the checkpoint `name` into the new folder `folder`, which appears whole or not at all, and returns it.
    Calls `before` with its manifest when all of it is here, just before it appears.

    Raises:
        DamagedError: a file is not the one that the manifest names.
        FileNotFoundError: a file is missing there.
    """
    staging = folder.with_name(f".staging-{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        store.download(f"{name}/{MANIFEST}", staging / MANIFEST)
        try:
            manifest = read_manifest(staging)
        except DamagedError as error:
            raise DamagedError(f"{store}/{name}: {error}") from error
        files = manifest["files"]

        def fetch(file: str) -> None:
            if ".." in PurePosixPath(file).parts or PurePosixPath(file).is_absolute():
                raise DamagedError(f"{store}/{name}: {file}: not the name of a checkpoint's file")
            target = staging / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if store.download(f"{name}/{file}", target).model_dump() != files[file]:
                raise DamagedError(f"{store}/{name}: {file}: content changed")

        with ThreadPoolExecutor(THREADS, "mirror") as pool:
            list(pool.map(fetch, files))
        before(manifest)
        commit_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def fetch_files(store: ObjectFolder, run: Path, sizes: Sizes, *, manifests: bool = False) -> None:
    """Fetches the files of the run that belong to no checkpoint, in place of those in the folder `run`; with
    `manifests` those of checkpoints, too."""
    folders = {f"{each}/" for each in find_committed(sizes)}
    for name in sizes:
        path = PurePosixPath(name)
        of_checkpoint = path.parts[0] == CHECKPOINTS or any(name.startswith(folder) for folder in folders)
        if is_own(path) or ".." in path.parts or (of_checkpoint and not (manifests and path.name == MANIFEST)):
            continue
        target = run / path
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.fetched")
        with contextlib.suppress(FileNotFoundError):  # removed there since it was listed
            store.download(name, draft)
            draft.replace(target)
