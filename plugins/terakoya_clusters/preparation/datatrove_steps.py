"""The two steps of a job under datatrove: encode a share of the blocks into parts, and join the parts."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import multiprocess
from datatrove.pipeline.base import PipelineStep

from terakoya import log, plugins
from terakoya.errors import UserError
from terakoya.preparation.encoding import BlockEncoder, EncodingTask
from terakoya.preparation.job import PrepareJob
from terakoya.preparation.resuming import is_from
from terakoya.store.token_store import Counts, StoreFacts
from terakoya_clusters.preparation.block_list import read_block_list


class _Step(PipelineStep):
    """A step that runs in the folder in which the command was started, with its plugins."""

    type = "terakoya"

    def __init__(self, job: PrepareJob) -> None:
        super().__init__()
        self.job = job
        self.folder = str(Path.cwd())
        self.plugins = {
            name: os.environ[name]
            for name in (plugins.PLUGINS_VARIABLE, plugins.WITHOUT_VARIABLE)
            if name in os.environ
        }

    def _restore_environment(self) -> None:
        os.chdir(self.folder)  # rejects.jsonl shows paths as the user gave them
        os.environ.update(self.plugins)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if self.plugins:
            plugins.load()


class EncodeBlocks(_Step):
    """Task `rank` of `world_size` writes the missing parts of its share of the blocks `numbers`."""

    name = "encode blocks"

    def __init__(self, job: PrepareJob, numbers: tuple[int, ...]) -> None:
        super().__init__(job)
        self.numbers = numbers

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Encodes without datatrove documents. Raises UserError if the parts now belong to another job."""
        self._restore_environment()
        _exit_with_parent()
        job = self.job
        if (job.out / "store.json").exists():
            return
        _check_inputs(job)
        blocks = read_block_list(job)
        own = blocks.rank_share(self.numbers, rank, world_size)
        parts, corpus = job.task.parts, job.task.corpus
        missing = [number for number in own if blocks.read_part(parts, number) is None]
        self.stat_update("parts that were there", value=len(own) - len(missing), unit="task")
        for number, block in blocks.with_bytes(corpus, missing, block_bytes=job.block_bytes):
            _check_inputs(job)
            facts = _encoder(job.task).encode(number, block)
            self.stat_update("documents", value=facts.counts.documents, unit="part")
            self.stat_update("tokens", value=facts.counts.tokens, unit="part")
            self.stat_update("rejected", value=sum(facts.counts.rejected.values()), unit="part")


class JoinParts(_Step):
    """One task that makes the store when all parts exist."""

    name = "join parts"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Joins without datatrove documents. Raises UserError if a part is missing, and as `PrepareJob.finish`."""
        log.configure()
        self._restore_environment()
        with self.job.lock_folder():
            if not (self.job.out / "store.json").exists():
                _check_inputs(self.job)
                join_parts(self.job, BlockEncoder(self.job.task))


def join_parts(job: PrepareJob, encoder: BlockEncoder, *, logs: Path | None = None) -> StoreFacts:
    """Makes the store from the parts. Raises UserError if a part is missing, and as `PrepareJob.finish`."""
    blocks, totals = read_block_list(job), Counts()
    missing: list[int] = []
    for number in range(len(blocks.blocks)):
        facts = blocks.read_part(job.task.parts, number)
        if facts is None:
            missing.append(number)
        else:
            totals += facts.counts
    if missing:
        raise UserError(
            f"{job.out}: {len(missing):,} of {len(blocks.blocks):,} parts are missing, number {missing[0]} the "
            f"first: a task did not finish; {f'see {logs}' if logs else 'see its log'}, and run the same "
            "command again: finished parts are kept"
        )
    return job.finish(totals, len(blocks.blocks), encoder, extent=blocks.extent)


@lru_cache(maxsize=1)
def _encoder(task: EncodingTask) -> BlockEncoder:
    return BlockEncoder(task)


def _check_inputs(job: PrepareJob) -> None:
    """Raises UserError unless the folder of parts still belongs to `job`."""
    if not is_from(job.task.parts, job.inputs):
        raise UserError(f"{job.out}: was started again with other input; this task belongs to the earlier start")


_watch: threading.Thread | None = None


def _exit_with_parent() -> None:
    """Makes this process, if it belongs to the pool of a Ray actor, end as soon as its parent process dies."""
    global _watch
    parent = multiprocess.parent_process()
    if parent is None or (_watch is not None and _watch.is_alive()):
        return

    def exit_after_parent() -> None:
        parent.join()
        os._exit(1)

    _watch = threading.Thread(target=exit_after_parent, daemon=True)
    _watch.start()
