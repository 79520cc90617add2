"""When and how a run's checkpoints are written: while everybody waits, or behind the next steps (`async_save`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from terakoya.errors import UserError
from terakoya.toolkit.formats import model_folder
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint.restoring import Facts, restore_module
from terakoya.training.checkpoint.snapshot import Snapshot
from terakoya.training.engines.engine import Engine
from terakoya.training.model import lora
from terakoya.training.run import Run

SECONDS_TO_LEAVE = 10.0
"""How long a process that leaves waits for its thread, which may wait for processes that are gone."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint under its final name, and the step it is of."""

    step: int
    folder: Path


class Saver:
    """The checkpoints that one run writes; every rank has one, and calls it like the others do.

    Behind the next steps a thread of each rank writes a copy of its state in host memory, made before the next step,
    and talks to the others' over a process group of its own. One save is under way at a time. While the context is
    open; who leaves it with an error does not wait for the others.

    Attributes:
        step: the step that was saved last, or is being saved; -1 at first.
    """

    def __init__(self, run: Run, engine: Engine, tokenizer_folder: Path) -> None:
        self.run = run
        self.engine = engine
        self.tokenizer_folder = tokenizer_folder
        self.settings = run.parameters.checkpoint
        self.link = run.context.new_group(run.parameters.parallel.timeout_seconds)
        self.step = -1
        self.shutdown = threading.Event()
        self.snapshot = Snapshot(self.shutdown)
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.under_way: Future[Path] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown.set()
        if self.under_way is not None:
            wait([self.under_way], SECONDS_TO_LEAVE)
        self.thread.shutdown(wait=False)

    def notes(self) -> list[str]:
        """What becomes of `async_save` where it cannot be had."""
        if not self.settings.async_save:
            return []
        if self.run.parameters.lora is not None:
            return ["checkpoint.async_save: adapters are small; every save is waited for"]
        if self.settings.model == "every" and self.waited_for(True):
            return [
                'checkpoint.async_save: no process holds the model; with checkpoint.model "every" saves are waited for'
            ]
        return []

    def save(self, facts: Mapping[str, Any]) -> Saved | None:
        """Writes the checkpoint of this step, or lets it be written.

        Args:
            facts: what its manifest says beside the files.

        Returns:
            the checkpoint; None where it is under way: `finish` has it.

        Raises:
            UserError: on every rank, if it failed on any.
        """
        assert self.under_way is None, "one at a time"
        run, engine = self.run, self.engine
        self.step = run.step
        write = partial(
            checkpoint.save,
            run.folder / "checkpoints",
            run.step,
            self.link,
            facts=facts,
            tokenizer_folder=self.tokenizer_folder,
            keep=self.settings.keep,
            shutdown=self.shutdown,
        )
        merged = self._with_model()
        if not self.settings.async_save or self.waited_for(merged):
            models = partial(
                write_models,
                run=run,
                whole=engine.full_module,
                merged=merged,
                tokenizer_folder=self.tokenizer_folder,
                started_from=facts["started_from"],
            )
            return Saved(run.step, write(engine, write_models=models))
        self.snapshot.take(engine)
        copied: Callable[[Path], None] = _nothing
        if merged and run.context.is_main:
            copied = self.snapshot.models(run.objective.exports(run.module))
        self.under_way = self.thread.submit(write, self.snapshot, write_models=copied)
        return None

    def _with_model(self) -> bool:
        """Whether the checkpoint of this step is to hold `model/`."""
        small = self.run.parameters.lora is not None  # next to what merged models would take
        model = self.settings.model or ("every" if self.engine.full_module and not small else "last")
        return model == "every" or (model == "last" and self.run.finished)

    def waited_for(self, merged: bool) -> bool:
        """Whether a save is waited for whatever `async_save` says: what is written with it comes from a module that is
        built for it, whose drawing of weights would get in the way of dropout; adapters are small anyway."""
        return self.run.parameters.lora is not None or (merged and not self.engine.full_module)

    def copies_model(self) -> bool:
        """Whether rank 0 copies whole models too, before some of the saves behind the steps."""
        return self.settings.model != "never" and not self.waited_for(True)

    def has_finished(self) -> bool:
        """Whether the save under way is through on this rank: when it is on all, `finish` has something to say.

        Raises:
            RuntimeError: it broke on this rank alone, or another process is gone.
        """
        if self.under_way is None or not self.under_way.done():
            return False
        error = self.under_way.exception()
        if error is not None and not isinstance(error, UserError):
            raise error
        return True

    def finish(self) -> Saved | None:
        """Waits for the save under way; returns its checkpoint, None where there was none.

        Raises:
            UserError: on every rank, if it failed on any.
        """
        if self.under_way is None:
            return None
        under_way, self.under_way = self.under_way, None
        return Saved(self.step, under_way.result())


def _nothing(folder: Path) -> None:
    """What is written beside `state/` where nothing is."""


def write_models(
    folder: Path, run: Run, *, whole: bool, merged: bool, tokenizer_folder: Path, started_from: Facts | None
) -> None:
    """Writes into the checkpoint `folder`, whose `state/` is there, what Transformers loads, and adapters as peft does.

    Args:
        whole: whether this process holds every weight of the run's module.
        merged: whether `model/` is wanted. `adapter/` is written with it, and where it costs no gathering.
        started_from: the folders of `start_from`.
    """
    parameters, module = run.parameters, run.module
    if merged and not whole:  # built from what was just written
        module = restore_module(
            folder, parameters, run.vocabulary, tokenizer_folder=tokenizer_folder, started_from=started_from
        )
    if parameters.lora is not None and (merged or whole):
        assert started_from is not None
        lora.write_adapters(run.objective.exports(module), folder, started_from)
    if not merged:
        return
    if parameters.lora is not None:
        module = lora.merged_copy(parameters, module, run.vocabulary)
    for name, model in run.objective.exports(module).items():
        model_folder.write(model, folder / "model" / name)
