"""Places: what a user names as a run, a token store or the files of a corpus. That is a folder or file of this machine,
or what a plugin brings by its scheme, such as s3:// (`hookspecs.register_places`).

All others ask the object; none of them knows what is behind a scheme.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from terakoya.errors import UserError
from terakoya.log import hide_secrets

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""The beginning of a place of a plugin such as `s3://bucket`, of which `Path` keeps one slash alone."""


class PlacedFile(Protocol):
    """A file of a corpus in a place of a plugin; picklable. `str` and `repr` hide the passwords in its name.

    Attributes:
        path: what names it, perhaps with a password.
        name: the last part of that.
        version: an identifier or a hash of the content, which another content does not have; empty if there is none.
    """

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

    def stat(self) -> Any:
        """Returns `st_size`, and as `st_mtime_ns` anything that distinguishes versions of the content."""

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedIOBase:
        """Opens the content as a seekable stream."""


@dataclass
class Keeper:
    """What keeps a place in step with a run's folder; `say` receives its warnings, perhaps from a thread."""

    say: Callable[[str], None] = logging.getLogger("terakoya").warning


class Place:
    """A place that is not on this machine: a plugin's class overrides what can be there, and the rest is refused.
    `name` is what the user writes, and is not shown, as it may hold a password: `str` hides that.

    All methods raise UserError where the place cannot be used, and TemporaryFailure where it does not answer.
    """

    is_local = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return hide_secrets(self.name)

    def find_files(self) -> Sequence[Path | PlacedFile]:
        """Returns the files of a corpus here: all in a folder, those that a pattern matches, or the file itself; or
        copies of them on this machine."""
        raise self._refusal("the files of a corpus")

    def open_store(self) -> Any:
        """Returns the `store.token_store.TokenStore` that is here."""
        raise self._refusal("a token store")

    def viewing(self) -> AbstractContextManager[Path]:
        """Yields a folder of this machine with the log, the parameters and the manifests of the run that is here; of
        other files of its checkpoints the names and sizes are enough. While a process trains it, its lock is held."""
        raise self._refusal("a run")

    def checkpoint(self) -> Path:
        """Returns a folder of this machine with the newest whole checkpoint of the run that is here, or that of a step
        where the name ends with @STEP."""
        raise self._refusal("a run")

    def verify(self) -> Iterable[tuple[str, str, Sequence[str]]]:
        """Reads all of the run or the store that is here. Yields the name of each part, what it is, and what is wrong
        with it."""
        raise self._refusal("a run or a token store")

    def work_folder(self, given: Path | str | None) -> Path:
        """Returns the folder of this machine in which a run trains that is kept here: `given`, or the default."""
        raise self._refusal("a run")

    def keep_in_step(
        self, folder: Path, context: Any, *, keep: int, start_over: bool
    ) -> AbstractContextManager[Keeper]:
        """Brings the newest checkpoint that is here into the run's `folder`, where it is of a later step; while the
        block runs, copies here what the run commits there, `keep` checkpoints at least; waits for that at the end.
        Called on all ranks, which `context`, a `distributed.context.DistributedContext`, connects."""
        raise self._refusal("a run")

    def has_run(self) -> bool:
        """Returns whether a run is here."""
        raise self._refusal("a run")

    def copy_in(self, folder: Path, *, keep: int) -> None:
        """Copies what is not here of the run in `folder`, which no process trains."""
        raise self._refusal("a run")

    def copy_out(self, folder: Path, say: Callable[[str], None]) -> None:
        """Copies the run that is here into the empty `folder`; `say` receives what is left out as it is damaged."""
        raise self._refusal("a run")

    def _refusal(self, what: str) -> UserError:
        return UserError(f"{self}: {what} cannot be at {self.name.partition(':')[0]}://")


class LocalFolder(Place):
    """A folder of this machine, where a run trains and is read: nothing is copied. Files and stores in it are opened
    by `corpus.files` and `store.token_store`."""

    is_local = True

    def viewing(self) -> AbstractContextManager[Path]:
        """Yields the folder itself."""
        return nullcontext(Path(self.name))

    def checkpoint(self) -> Path:
        """Returns what the user names: the run, the checkpoint, or RUN@STEP."""
        return Path(self.name)

    def work_folder(self, given: Path | str | None) -> Path:
        """Returns the folder itself. Raises UserError where another is given."""
        if given is not None:
            raise UserError(
                f"--work-folder {given}: expected an address such as s3://bucket/run in --out, got {self}, a "
                "folder; leave out --work-folder"
            )
        return Path(self.name)

    def keep_in_step(
        self, folder: Path, context: Any, *, keep: int, start_over: bool
    ) -> AbstractContextManager[Keeper]:
        """Does nothing."""
        return nullcontext(Keeper())


HERE = LocalFolder(".")
"""Where a run stays in its folder."""


registered: Callable[[], tuple[Mapping[str, Callable[[str], Place]], str]] = lambda: ({}, "")  # noqa: E731
"""Returns the places of plugins by scheme, "*" for all others, and the end of a sentence for a missing scheme;
`terakoya` sets it as it is imported."""


def place_of(name: Path | str) -> Place:
    """Returns the place that a user names. Raises UserError where no plugin has its scheme."""
    match = SCHEME.match(str(name))
    if match is None:
        return LocalFolder(str(name))
    places, missing = registered()
    if (kind := places.get(match[1]) or places.get("*")) is None:
        raise UserError(f"{hide_secrets(as_written(name))}: no plugin has places at {match[1]}://{missing}")
    return kind(as_written(name))


def is_local(name: Path | str) -> bool:
    """Returns whether what a user names is on this machine: it begins with no scheme such as `s3://`."""
    return SCHEME.match(str(name)) is None


def as_written(name: Path | str) -> str:
    """Returns what a user names with the slashes that `Path` has folded."""
    slashes = "///" if str(name).startswith(("file:", "local:")) else "//"
    return SCHEME.sub(rf"\1:{slashes}", str(name), count=1)


def check_local(name: Path | str, what: str) -> None:
    """Raises UserError if `name`, which is for `what` (such as "the run's folder"), is not on this machine."""
    if not is_local(name):
        raise UserError(f"{as_written(name)}: expected {what}, got an address; {advise_local(name)}")


def advise_local(name: Path | str) -> str:
    """Returns what to do where the place `name` cannot be used."""
    scheme = str(name).partition(":")[0]
    return (
        f"at {scheme}:// can be corpora, the stores of a run, and the run that `terakoya train --out` makes. Give a "
        "folder of this machine, and copy it there or back with the object store's own tool, or mount it"
    )


@contextmanager
def open_views(runs: Sequence[Path]) -> Iterator[list[Path]]:
    """Yields a folder of this machine for each of `runs`: see `Place.viewing`."""
    with ExitStack() as stack:
        yield [stack.enter_context(place_of(run).viewing()) for run in runs]


def as_fields(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `given`, values from a program, as the fields of the dataclass `options` hold them: a path for a string,
    and a sequence for one path or string where there may be several. Annotations of its module are text."""
    kind_of = re.compile(r"(?:Annotated\[)?(Sequence\[)?(Path|str)\b").match
    kinds = {each.name: kind_of(str(each.type)) for each in fields(options)}
    made = dict(given)
    for name, value in given.items():
        kind = kinds.get(name)
        if kind is not None and isinstance(value, str | Path):
            one = Path(value) if kind[2] == "Path" else value
            made[name] = [one] if kind[1] else one
        elif kind is not None and kind[1] and value:
            made[name] = [Path(each) if kind[2] == "Path" else each for each in value]
    return made
