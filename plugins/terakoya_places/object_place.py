"""An address such as s3://bucket/run as a place of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.places import Keeper, Place, PlacedFile, check_local
from terakoya_places import cached_store, corpus_files, keeping, run_objects, run_view
from terakoya_places.object_folder import ObjectFolder, cache_folder, cache_name


class ObjectPlace(Place):
    """See `Place`, also for what each method does."""

    def find_files(self) -> Sequence[Path | PlacedFile]:
        return corpus_files.find_files(self.name)

    def open_store(self) -> Any:
        return cached_store.open_remote(self.name)

    def viewing(self) -> AbstractContextManager[Path]:
        return run_view.viewing(ObjectFolder(self.name))

    def checkpoint(self) -> Path:
        return run_view.fetch_checkpoint(self.name)

    def verify(self) -> Iterator[tuple[str, str, Sequence[str]]]:
        store = ObjectFolder(self.name)
        sizes = store.sizes()
        names = run_objects.find_committed(sizes)
        if "store.json" in sizes:
            yield str(store), "a token store; all files have their hashes", cached_store.find_faults(store)
        elif not names:
            raise UserError(
                f"{store}: expected a run or a token store, found neither a checkpoint nor a store.json there"
            )
        else:
            for name in names:
                problems = run_objects.find_problems(store, name)
                yield f"{store}/{name}", "whole; all files have their hashes", problems

    def work_folder(self, given: Path | str | None) -> Path:
        if given is None:
            return cache_folder() / "runs" / cache_name(self.name)
        check_local(given, "a work folder of this machine")
        return Path(given)

    def keep_in_step(
        self, folder: Path, context: Any, *, keep: int, start_over: bool
    ) -> AbstractContextManager[Keeper]:
        return keeping.keep_in_step(self.name, folder, context, keep=keep, start_over=start_over)

    def has_run(self) -> bool:
        return run_objects.has_run(ObjectFolder(self.name).sizes())

    def copy_in(self, folder: Path, *, keep: int) -> None:
        keeping.send_run(folder, self.name, keep=keep)

    def copy_out(self, folder: Path, say: Callable[[str], None]) -> None:
        run_objects.fetch_run(ObjectFolder(self.name), folder, say)
