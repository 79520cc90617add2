"""From parameters to a trainer that stands: processes, stores, weights, checkpoint, in the order that fails soonest."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from terakoya.components import Architecture, Objective
from terakoya.components.progress import Length
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters, resolve_length
from terakoya.errors import UserError
from terakoya.plugins import Registry, registry
from terakoya.rows.loader import Loader
from terakoya.toolkit.architectures import attention
from terakoya.training import run_folder
from terakoya.training.batches import BatchMaker, to_device
from terakoya.training.checkpoint.restoring import without_base
from terakoya.training.distributed.context import DistributedContext, connect
from terakoya.training.distributed.signals import StopRequest
from terakoya.training.distributed.topology import LaunchInfo, describe_lost_nodes, rank_batches
from terakoya.training.engines import build as engines
from terakoya.training.engines import fp8 as distributed_fp8
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import Engine
from terakoya.training.loss import weighted_loss
from terakoya.training.model import lora
from terakoya.training.model.build import build_module_for_training
from terakoya.training.model.frozen_layers import parameter_summary
from terakoya.training.model.start_from import LoadedWeights, load_on_rank0_and_broadcast
from terakoya.training.resuming import newest_checkpoint, resume
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog
from terakoya.training.stores import Stores
from terakoya.training.throughput import measure
from terakoya.training.trainer import Trainer, TrainResult
from terakoya.version import __version__

COUNTED_ROWS = 256
"""Rows whose tokens are counted to know what a row holds on average."""

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "tokenizers", "safetensors", "numpy")


Advice = Callable[[Parameters, Vocabulary, DistributedContext], AbstractContextManager[None]]
"""What is open while a run is built and trained, and may turn an error into advice."""


def no_advice(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> AbstractContextManager[None]:
    """Errors stay what they are."""
    return contextlib.nullcontext()


def train_in_this_process(
    parameters: Parameters,
    out: Path,
    *,
    node_rank: int | None = None,
    expected_processes: int | None = None,
    allow_change: frozenset[str] = frozenset(),
    advice: Advice = no_advice,
) -> TrainResult:
    """Trains in this process, one of however many the launcher started; goes on if `out` holds a checkpoint.

    Raises:
        UserError: anything the user can mend, on every rank, as early as it can be known.
    """
    start = time.perf_counter()
    launched = LaunchInfo.from_environment(node_rank=node_rank)
    if expected_processes is not None and launched.launcher and launched.world_size != expected_processes:
        raise UserError(f"--processes {expected_processes}, but {launched.launcher} started {launched.world_size}")
    stores = Stores.open(parameters)
    context = connect(
        launched,
        deepspeed=parameters.parallel.engine == "deepspeed",
        replica_size=parameters.parallel.replica_size,
        timeout_seconds=parameters.parallel.timeout_seconds,
    )
    failed = True
    with StopRequest() as stop:
        try:
            with run_folder.hold(out, context):
                result = _train(parameters, out, stores, context, start, allow_change, stop, advice)
            failed = False
            return result
        except BaseException:
            stop.close()  # what hangs from here on can be killed
            raise
        finally:
            context.close(failed=failed)


def _train(
    parameters: Parameters,
    out: Path,
    stores: Stores,
    context: DistributedContext,
    start: float,
    allow_change: frozenset[str],
    stop: StopRequest,
    advice: Advice,
) -> TrainResult:
    plugins = registry()
    run_log = RunLog(out, parameters.trackers, parameters.dump(), active=context.is_main)
    error: BaseException | None = None
    trainer: Trainer | None = None
    try:
        folder = newest_checkpoint(out, context, run_log)
        with advice(parameters, stores.vocabulary, context):
            trainer = build_trainer(parameters, out, stores, context, run_log, plugins, fresh=folder is None)
            trainer.run.facts["start"] = start
            if folder is not None:
                resume(trainer, folder, allow_change)
            if context.is_main:
                text = json.dumps(parameters.dump(), indent=2, ensure_ascii=False)
                (out / "parameters.json").write_text(text + "\n")
            return trainer.train(stop)
    except BaseException as raised:
        error = raised
        run_log.write("error", step=trainer.run.step if trainer else None, text=f"{type(raised).__name__}: {raised}")
        raise
    finally:
        if trainer is not None:
            plugins.hook.run_finished(trainer.run, error)
        run_log.close()


def build_trainer(
    parameters: Parameters,
    out: Path,
    stores: Stores,
    context: DistributedContext,
    run_log: RunLog,
    plugins: Registry,
    *,
    fresh: bool = True,
) -> Trainer:
    """The trainer of a new run: weights drawn after seeding, the same on every rank, or those of `start_from`.

    A run that is not `fresh` takes its weights from a checkpoint next; it does not look at `start_from`, unless these
    are adapters over the weights there.
    """
    architecture: Architecture = parameters.architecture
    objective: Objective = parameters.objective
    if parameters.precision == "fp8":
        distributed_fp8.check(context.device)
    redistribute = parameters.on_lost_node == "redistribute"
    rank_batch = rank_batches(
        parameters.batch_size, parameters.micro_batch_size, context.topology, redistribute=redistribute
    )[context.rank]
    if redistribute and (lost := describe_lost_nodes(parameters.batch_size, context.topology)):
        run_log.warn(lost)
    tokens = sum(store.facts.tokens for store in stores.train)
    layout = objective.row_layout()
    loader = stores.loader(parameters, layout, global_rows=rank_batch.global_rows)
    epoch_rows = sum(len(source) for source in loader.sources)
    validation = stores.validation_rows(parameters, layout)
    length = resolve_length(
        parameters,
        rows=epoch_rows,
        tokens_per_row=_tokens_per_row(loader, objective, stores.vocabulary) if epoch_rows else 0.0,
        global_rows=rank_batch.global_rows,
    )
    module = build_module_for_training(parameters, stores.vocabulary)
    backend = attention.choose(
        parameters.attention,
        device=context.device,
        precision=parameters.precision,
        dropout=attention.dropout(module),
        document_masking=architecture.document_masking,
    )
    attention.use(module, backend)
    module.train()
    started: LoadedWeights | None = None
    if parameters.start_from is not None and (fresh or parameters.lora):
        tokenizer_folder = stores.train[0].tokenizer_folder
        try:
            started = load_on_rank0_and_broadcast(parameters, module, stores.vocabulary, tokenizer_folder, context)
        except UserError as error:
            raise (error if fresh else without_base(error)) from error
        for note in started.notes:
            run_log.print(note)
    if parameters.frozen_layers >= 0 and parameters.start_from is None:
        run_log.warn(
            f"frozen_layers {parameters.frozen_layers} without start_from: weights that nobody trained stay so"
        )
    count = sum(parameter.numel() for parameter in module.parameters())
    lora.add_adapters(module, parameters.lora, seed=parameters.seed)
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    sizes = parameter_summary(module, frozen_layers=parameters.frozen_layers, lora=parameters.lora)
    throughput = measure(objective, architecture, module, loader.sources, loader.weights, context)
    engine = engines.build(
        parameters, module, stores.vocabulary, context, rank_batch.micro_steps, rank_batch.micro_batch_size
    )
    run = Run(out, parameters, architecture, objective, stores.vocabulary, engine.module, length, context)
    parameters.schedule.check(run.progress())
    batches = BatchMaker(loader, objective, stores.vocabulary, rank_batch, end=length.rows)
    _warm_up(engine, batches, context, flash=backend == "flash")
    run_log.print(
        f"{context.topology.describe()} on {context.device.type}, {parameters.parallel.describe()}, "
        f"{parameters.precision}, attention {backend}; {sizes}; {tokens:,} tokens in "
        f"{epoch_rows:,} rows of {parameters.data.sequence_length}; {rank_batch.global_rows} rows a step, "
        f"{rank_batch.micro_steps} micro-step{'s' if rank_batch.micro_steps > 1 else ''} of "
        f"{rank_batch.micro_batch_size}; "
        f"{length.describe()}"
    )
    if length.rows is not None and len(loader.sources) > 1:
        run_log.print(f"by their weights these {length.rows:,} rows are {_passes(loader, length.rows)}")
    return Trainer(
        run, engine, batches, validation, run_log, plugins,
        tokenizer_folder=stores.train[0].tokenizer_folder,
        facts={
            **_facts(parameters, stores, context, plugins, length, count),
            "trained_parameter_count": trained,
            "started_from": started.facts if started else None,
        },
        throughput=throughput,
        flash=backend == "flash",
    )  # fmt: skip


def _tokens_per_row(loader: Loader, objective: Objective, vocabulary: Vocabulary) -> float:
    """Real tokens of a row, as the objective counts them: the mean over the first rows of the order."""
    return objective.collate(loader.load(0, COUNTED_ROWS), vocabulary).counts["tokens"] / COUNTED_ROWS


def _passes(loader: Loader, rows: int) -> str:
    """How often each store is read in the first `rows` rows of the order."""
    taken = zip(loader.sources, loader.store_positions(rows), strict=True)
    return ", ".join(f"{int(each['rows']) / len(source):.2f} x {each['store']}" for source, each in taken)


def _warm_up(engine: Engine, batches: BatchMaker, context: DistributedContext, *, flash: bool) -> None:
    """A synchronised backward whose gradients are zero, two with DDP, before anything counts.

    DDP lays its buckets out anew after its first backward, which changes the rounding of sums over three and more
    ranks: with this every start, fresh or resumed, adds in the same order. The second fills the new ones, so that the
    first step that counts finds gradients where they stay.
    """
    if context.world_size == 1 or not isinstance(engine, DDPEngine):
        return
    terms = batches.objective.terms()
    nothing = dict.fromkeys({term.count for term in terms.values()}, 0)
    batch = to_device(batches.dummy(), context.device, flash=flash)
    for _ in range(2 if engine.uses_ddp else 1):
        engine.optimizer.zero_grad()  # those of the first would keep its buckets
        engine.micro_step(batch, partial(weighted_loss, terms=terms, counts=nothing), last=True)
    engine.clear_gradients()


def _facts(
    parameters: Parameters, stores: Stores, context: DistributedContext, plugins: Registry, length: Length, count: int
) -> dict[str, Any]:
    """What the manifest says of where a checkpoint comes from."""
    return {
        "parameters": parameters.dump(),
        "max_steps": length.steps,
        "max_tokens": length.tokens,
        "length_unit": length.unit,
        "parameter_count": count,
        "vocabulary": stores.vocabulary.model_dump(mode="json"),
        "stores": stores.fingerprints(),
        "plugins": plugins.record(parameters.dump(plugins)),
        "world": {
            "processes": context.world_size,
            "nodes": context.topology.processes_per_node(),
            "threads": torch.get_num_threads(),
            "device": context.device.type,
            "engine": parameters.parallel.engine,
        },
        "versions": {"terakoya": __version__, "python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
