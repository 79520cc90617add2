"""When and how a run saves checkpoints: all ranks wait for each save, or it runs in the background (`async_save`).

See docs/design/files.md.
"""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn
from transformers import PreTrainedModel

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.distributed.cpu_allocator import returning_freed_memory
from terakoya.errors import FileError, TemporaryFailure, UserError
from terakoya.toolkit.formats import model_folder
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint.event_tensors import EventTensors
from terakoya.training.checkpoint.restoring import StartFacts, models_to_write, restore_module
from terakoya.training.checkpoint.snapshot import Snapshot
from terakoya.training.engines.engine import Engine
from terakoya.training.model import lora
from terakoya.training.model.thread_generator import ThreadGenerator
from terakoya.training.run import Run

MAX_FAILED_SAVES = 3
"""A run ends after so many saves in a row that failed for want of space or of an answer from the disk."""
RETRY_SECONDS = 5.0
"""How long the run waits before it tries its last save again."""
SHUTDOWN_SECONDS = 10.0
"""How long a process that leaves waits for its background save, which may be waiting for processes that are gone."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint under its final name, and the step that it is of."""

    step: int
    folder: Path


class Saver:
    """Saves the checkpoints of one run. Every rank has one, and all ranks call its methods alike.

    A background save first copies this rank's shards to host memory, before the next step; a thread then writes the
    copy and communicates with the other ranks over its own process group. One save runs at a time. Leaving the context
    ends the thread, and does not wait for the other ranks for long.

    A save that the disk refuses is reported, and the next one tries again: only `MAX_FAILED_SAVES` in a row end a run.

    Attributes:
        step: the step that was saved last, or is being saved; -1 at first.
        saved_step: the step that was saved last; -1 if there is none.
        failures: how many saves in a row have failed.
        is_writing: whether the run waits for a save that is being written.
    """

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run = run
        self.engine = engine
        self.run_log = run.run_log
        self.settings = run.parameters.checkpoint
        self.context = run.context.new_group(run.parameters.parallel.timeout_seconds)
        self.step = self.saved_step = -1
        self.failures = 0
        self.is_writing = False
        self.shutdown = threading.Event()
        self.place = checkpoint.Place(
            run.folder / "checkpoints", run.tokenizer_folder, self.settings.keep, self.shutdown, run.run_log.sync
        )
        self.snapshot = Snapshot(self.shutdown)
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[Path] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown.set()
        if self.pending is not None:
            wait([self.pending], SHUTDOWN_SECONDS)
        self.thread.shutdown(wait=False)

    def save(
        self, facts: Mapping[str, Any], *, event_tensors: EventTensors, keep_before: int | None = None
    ) -> SavedCheckpoint | None:
        """Saves the checkpoint of this step, or begins to save it in the background; see `checkpoint.Content`.

        Returns:
            the checkpoint; None where the save runs in the background: `finish` returns it then; and where the disk
            refused it.

        Raises:
            TemporaryFailure: on every rank, if `MAX_FAILED_SAVES` in a row have failed.
            UserError: on every rank, if saving failed on any for another reason.
        """
        assert self.pending is None, "one at a time"
        run, engine = self.run, self.engine
        self.step = run.step
        facts = copy.deepcopy(dict(facts))  # steps continue while the manifest waits to be written
        write = partial(checkpoint.save, self.place, run.step, self.context)
        models = choose_saved_models(run.parameters, full_module=engine.full_module)
        folders = ModelFolders(
            run.module if engine.full_module else None, run.built_parameters, run.vocabulary,
            with_model=models == "every" or (models == "last" and run.finished),
            tokenizer_folder=run.tokenizer_folder, started_from=facts["started_from"],
        )  # fmt: skip
        content = partial(checkpoint.Content, facts, keep_before=keep_before)
        if not self.settings.async_save:
            self.is_writing = True
            try:
                write_models = partial(write_model_folders, folders=folders)
                return self._result(partial(write, content(engine, event_tensors, write_models)))
            finally:
                self.is_writing = False
        self.snapshot.take(engine)
        copies = self.snapshot.copy_tensors(event_tensors)
        if run.context.is_main and engine.full_module and run.parameters.lora is None:
            write_copies = self.snapshot.copy_models(run.objective.exports(run.module) if folders.with_model else {})
        else:  # called on rank 0 alone
            if run.context.is_main and engine.full_module:
                copied, adapted = self.snapshot.copy_trained(run.module), run.objective.exports(run.module)
                folders = replace(folders, copies=copied, adapted=adapted)
            write_copies = partial(_write_beside_training, folders=folders)
        self.pending = self.thread.submit(write, content(self.snapshot, copies, write_copies))
        return None

    def has_finished(self) -> bool:
        """Whether this rank has finished the background save; once all ranks have, `finish` returns without waiting.
        Raises RuntimeError if the save failed on this rank alone, or another process is gone."""
        if self.pending is None or not self.pending.done():
            return False
        error = self.pending.exception()
        if error is not None and not isinstance(error, UserError):
            raise error
        return True

    def saving_step(self) -> int | None:
        """Returns the step of the checkpoint that is being written; None where none is."""
        pending = self.pending
        return self.step if self.is_writing or (pending is not None and not pending.done()) else None

    def finish(self) -> SavedCheckpoint | None:
        """Waits for the background save and returns its checkpoint; None where there was no save, or the disk refused
        it. Raises as `save` does."""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        return self._result(pending.result)

    def _result(self, save: Callable[[], Path]) -> SavedCheckpoint | None:
        """Returns the checkpoint that `save` returns; None, and a warning, where all ranks agree that the disk refused
        it."""
        try:
            folder = save()
        except FileError as error:
            failed, self.step, self.failures = self.step, self.saved_step, self.failures + 1
            safe = f"step {self.saved_step:,} is safe" if self.saved_step >= 0 else "nothing was saved so far"
            if error.errno == errno.EFBIG:  # a limit, which does not pass
                raise UserError(f"{error.happened}; {safe}{error.advice}") from error
            if self.failures >= MAX_FAILED_SAVES:
                happened = f"{self.failures} saves in a row failed: {error.happened}; {safe}"
                raise TemporaryFailure(happened + error.advice) from error
            self.run_log.warn(
                f"step {failed:,} could not be saved ({self.failures} of {MAX_FAILED_SAVES} failed saves in a row that "
                f"end a run): {error.happened}; {safe}, and the next save tries again",
                step=failed,
            )
            return None
        self.saved_step, self.failures = self.step, 0
        return SavedCheckpoint(self.step, folder)


def choose_saved_models(parameters: Parameters, *, full_module: bool) -> Literal["every", "last", "never"]:
    """Returns which checkpoints get a `model/`; `full_module` is the engine's."""
    prefers_adapters = parameters.lora is not None  # they are small next to merged models
    return parameters.checkpoint.model or ("every" if full_module and not prefers_adapters else "last")


def _write_beside_training(folder: Path, *, folders: ModelFolders) -> None:
    """Writes `folders` while training draws random numbers."""
    with ThreadGenerator():
        write_model_folders(folder, folders=folders)


@dataclass(frozen=True)
class ModelFolders:
    """What `model/` for Transformers and `adapter/` for peft are written from.

    Attributes:
        module: the run's; None where this process does not hold every weight of it.
        parameters: those with which the module is built now.
        with_model: whether to write `model/`. `adapter/` is written with it, and wherever the module is whole anyway.
        started_from: the manifest's entry about the folders of `start_from`.
        copies: with adapters, are in the place of tensors of the module.
        adapted: what the objective exported of the module when these were copied.
    """

    module: nn.Module | None
    parameters: Parameters
    vocabulary: Vocabulary
    with_model: bool
    tokenizer_folder: Path
    started_from: StartFacts | None
    copies: lora.Copies = field(default_factory=lambda: lora.NO_COPIES)
    adapted: Mapping[str, PreTrainedModel] | None = None


@returning_freed_memory()
def write_model_folders(folder: Path, *, folders: ModelFolders) -> None:
    """Writes `folders` into the checkpoint `folder`, which has its `state/`."""
    module, parameters, vocabulary = folders.module, folders.parameters, folders.vocabulary
    if module is None and not folders.with_model:
        return
    if module is None and parameters.lora is None:
        models = models_to_write(folder, parameters, vocabulary, tokenizer_folder=folders.tokenizer_folder)
        for name, model in models.items():
            model_folder.write(model, folder / "model" / name)
        return
    if module is None:  # rebuild it from the `state/` that was just written
        module = restore_module(
            folder, parameters, vocabulary,
            tokenizer_folder=folders.tokenizer_folder, started_from=folders.started_from,
        )  # fmt: skip
    objective = parameters.objective
    if parameters.lora is not None:
        assert folders.started_from is not None
        adapted = folders.adapted or objective.exports(module)
        lora.write_adapters(adapted, folder, folders.started_from, folders.copies)
    if not folders.with_model:
        return
    if parameters.lora is not None:
        module = lora.merged_copy(parameters, module, vocabulary, folders.copies)
    for name, model in objective.exports(module).items():
        model_folder.write(model, folder / "model" / name)
