"""Builds a trainer from parameters: processes, stores, weights, engine. What can fail early is checked early."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import platform
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from terakoya.atomic_files import write_text
from terakoya.components import ModuleBuild
from terakoya.config import nccl
from terakoya.config.parameters import Parameters, check_allowed_changes
from terakoya.distributed import nccl_algorithms
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.rank_watch import find_communication_error
from terakoya.distributed.signals import StopRequest
from terakoya.distributed.topology import LaunchInfo, describe_lost_nodes
from terakoya.errors import Stopped, describe_error
from terakoya.log import translated
from terakoya.places import Keeper
from terakoya.plugins import PluginError, registry
from terakoya.plugins.run_record import record_plugins
from terakoya.rows.stores import Stores
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.fast_products import describe_processor, precision_problems
from terakoya.training.batches import BatchMaker
from terakoya.training.engines import build as engines
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.learning_rates import optimizer_shards
from terakoya.training.model import compilation, determinism
from terakoya.training.model.build import InitialModule, build_initial
from terakoya.training.model.frozen_layers import parameter_summary
from terakoya.training.model.kernels import Kernels, choose_kernels
from terakoya.training.model.module_parts import has_learned_positions, saved_values
from terakoya.training.model.transforms import check_device, find_transforms, transform
from terakoya.training.resuming.changes import check_vocabulary
from terakoya.training.resuming.resume import newest_checkpoint, resume
from terakoya.training.rollback import DecidedRollback, Rollback
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog, recorded_refusal
from terakoya.training.run_plan import RunPlan, make_plan
from terakoya.training.start import warm_up
from terakoya.training.start.meeting import DEFAULTS, StartOptions, hold_folder, meet, package_versions
from terakoya.training.throughput import create_throughput
from terakoya.training.trainer import Trainer, TrainResult

log = logging.getLogger("terakoya")
TRUNK = 0.1
"""The share of its peak above which a learning rate has not decayed at the end of a run."""


def train_in_this_process(parameters: Parameters, out: Path, options: StartOptions = DEFAULTS) -> TrainResult:
    """Trains in this process, together with all processes that the launcher started; resumes if `out` has a checkpoint.

    Raises:
        TemporaryFailure: at the end, something could not be copied to the run's place.
        UserError: every error that the user can fix, as early as it can be known.
    """
    start_time = time.perf_counter()
    rank = LaunchInfo.from_environment(node_rank=options.node_rank).rank
    with recorded_refusal(out) if rank == 0 else contextlib.nullcontext():
        check_allowed_changes(options.allow_change, parameters, registry())
        parameters, stores, context = meet(parameters, out, options)
    with contextlib.nullcontext(options.stop) if options.stop is not None else StopRequest() as stop, context:
        try:
            keep = parameters.checkpoint.keep
            with (
                determinism.restore_choice(),
                hold_folder(out, context),
                options.place.keep_in_step(out, context, keep=keep, start_over=options.start_over) as keeper,
            ):
                if parameters.parallel.nccl.flight_recorder:
                    (out / nccl.FOLDER).mkdir(exist_ok=True)
                return _train(_Started(parameters, out, options, stores, context, start_time, stop), keeper)
        except BaseException:
            stop.close()  # from here on a signal kills this process, even if it hangs
            raise


@dataclass(frozen=True)
class _Started:
    """A run whose processes have met; `stop` is what listens, and `start_time` when the program began to start it."""

    parameters: Parameters
    out: Path
    options: StartOptions
    stores: Stores
    context: DistributedContext
    start_time: float
    stop: StopRequest


def _train(started: _Started, keeper: Keeper) -> TrainResult:
    context, parameters = started.context, started.parameters
    open_log = partial(RunLog, started.out, parameters.trackers, parameters.dump())
    opening = f"opening {started.out}"
    run_log = context.run_on_main(opening, partial(open_log, active=True)) or open_log(active=False)
    if context.heartbeat is not None and context.is_main:
        context.heartbeat.say = run_log.warn
    keeper.say = run_log.warn
    try:
        ended = _train_until_rollback(started, run_log, rollbacks=None)
        while not isinstance(ended, TrainResult):
            started.stop.outlook = None
            free_memory(context)
            ended = _train_until_rollback(started, run_log, rollbacks=ended)
        return ended
    finally:
        keeper.say = log.warning
        run_log.close()


def _train_until_rollback(
    started: _Started, run_log: RunLog, *, rollbacks: tuple[Rollback, ...] | None
) -> TrainResult | tuple[Rollback, ...]:
    """Trains from the newest checkpoint to the end of the run, or until it goes back: returns all rollbacks then.
    `rollbacks` are those of the run, after the last of which it starts again; None takes the checkpoint's."""
    parameters, out, options = started.parameters, started.out, started.options
    stores, context, stop = started.stores, started.context, started.stop
    error: BaseException | None = None
    trainer: Trainer | None = None
    frozen_before = gc.get_freeze_count()
    try:
        folder = newest_checkpoint(out, context, run_log, start_over=options.start_over and rollbacks is None)
        if folder is not None:
            check_vocabulary(folder, stores)
        with compilation.explain_compile_errors(), options.advice(parameters, stores.vocabulary, context):
            trainer = build_trainer(parameters, out, stores, context, run_log, fresh=folder is None)
            trainer.run.start_time = started.start_time
            if folder is not None:
                resume(trainer, folder, options.allow_change)
            if rollbacks is not None:
                trainer.skipped.rollbacks = rollbacks
                trainer.skipped.log_rollback()
            text = json.dumps(parameters.dump(), indent=2, ensure_ascii=False)
            context.run_on_main(f"opening {out}", partial(write_text, out / "parameters.json", text + "\n"))
            run_log.begin_tracking(trainer.run.step, attempt=len(trainer.skipped.rollbacks) + 1)
            gc.collect()
            gc.freeze()  # a collection during a step then does not look at all that the run was built of
            result = trainer.train(stop)
            context.barrier()  # here, not at the end: what events do when the run has finished may take hours
            if context.heartbeat is not None:
                context.heartbeat.leave()
            return result
    except DecidedRollback as going:
        error = going.with_traceback(None)  # which holds the trainer
        return going.rollbacks
    except BaseException as raised:
        error = _cause(raised, context, stop, trainer)
        run_log.write("error", step=trainer.run.step if trainer else None, text=describe_error(error))
        if error is not raised:
            raise error from raised
        raise
    finally:
        if not frozen_before:
            gc.unfreeze()
        if trainer is not None:
            try:
                trainer.events.finish(error)
            except PluginError as failed:
                if error is None:
                    raise
                run_log.warn(str(failed))  # what ended the run decides its exit code


def _cause(
    raised: BaseException, context: DistributedContext, stop: StopRequest, trainer: Trainer | None
) -> BaseException:
    """Returns the error to report for `raised`: that another rank hangs or is gone, where that is the cause of it."""
    if context.heartbeat is None:
        return raised
    if stop.signal and trainer is not None and not trainer.step_log.step_seconds and find_communication_error(raised):
        return Stopped(f"stopped by {stop.signal} before the first step; the same command continues the run")
    return context.heartbeat.explain(raised) or raised


def free_memory(context: DistributedContext) -> None:
    """Frees what the trainer has left that went back, before another one is built; on a GPU also CUDA graphs, which
    keep their memory and what they were compiled of."""
    if context.heartbeat is not None:
        context.heartbeat.follow(step=lambda: 0, work=lambda: (0, 0.0))
    gc.collect()
    if context.device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()


def build_trainer(
    parameters: Parameters,
    out: Path,
    stores: Stores,
    context: DistributedContext,
    run_log: RunLog,
    *,
    fresh: bool = True,
) -> Trainer:
    """Builds the trainer of a run at its first step; collective. Raises UserError if parameters, stores, processes and
    weights do not fit each other.

    A `fresh` run has randomly initialised weights, the same on every rank, or those of `start_from`. A run that is not
    fresh gets its weights from a checkpoint next; it reads `start_from` only for base weights.
    """
    architecture, objective, vocabulary = parameters.architecture, parameters.objective, stores.vocabulary
    tokenizer_folder = stores.train[0].tokenizer_folder

    check_device(parameters, context.device)

    # Data: which rows of the order each step takes, and which of them this rank; the length of the run.
    plan = make_plan(parameters, stores, context.topology, context.rank)
    loader, length = plan.loader, plan.length
    redistribute = parameters.on_lost_node == "redistribute"
    if redistribute and (lost := describe_lost_nodes(parameters.batch_size, context.topology)):
        run_log.warn(lost)
    for warning in (*filter(None, [parameters.data.odd_split()]), *stores.repetitions()):
        run_log.warn(warning)
    layout = objective.row_layout()
    validation = stores.validation_rows(layout, seed=parameters.seed)

    if context.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = parameters.tf32
        attention.leave_out_cudnn()
        determinism.choose(parameters.deterministic)
        if parameters.deterministic:
            run_log.print(determinism.NOTICE)

    # Model: weights, and what computes it.
    in_parts = engines.holds_parts(parameters, context)
    built = build_initial(parameters, vocabulary, tokenizer_folder, context, fresh=fresh, in_parts=in_parts)
    module = built.module
    _report_weights(built, parameters, plan, run_log, fresh=fresh)
    kernels = choose_kernels(parameters, module, loader, context, run_log)
    masked = kernels.attention == "sdpa" and kernels.compiled != "off"
    attention.use(module, attention.MASKED if masked else kernels.attention)
    module.train()
    trained_count = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    parameter_counts = parameter_summary(module, parameters)
    shapes = {name: tuple(value.shape) for name, value in saved_values(module)}

    # Engine: it takes the module over, and may replace or shard its weights.
    throughputs = [
        create_throughput(phase.objective, architecture, module, loader.mixture_at(phase.span.first_row), context)
        for phase in plan.phases
    ]
    batches_of_phases = [phase.rank_batch for phase in plan.phases]
    micro_steps = max(each.micro_steps for each in batches_of_phases)
    micro_batch_size = max(each.micro_batch_size for each in batches_of_phases)
    build = ModuleBuild(parameters, vocabulary, context, kernels.compiled, kernels.cuda_graphs, run_log.warn)
    engine = engines.build(
        module, build, micro_steps=micro_steps, micro_batch_size=micro_batch_size, deferred=built.deferred
    )
    transform("compile", engine.module, build)
    batches = BatchMaker(plan, vocabulary, flash=kernels.attention == "flash", compiled=kernels.compiled != "off")
    if kernels.cuda_graphs and parameters.cuda_graphs == "auto":
        assert isinstance(engine, DDPEngine), "other engines are an obstacle"
        obstacle = warm_up.find_graph_obstacle(engine, batches, objective, validates=bool(validation))
        if obstacle is not None:
            run_log.print(f"CUDA graphs off: {obstacle}")
            compilation.uncompile(engine.module)
            engine.leave_graphs()
            choice = compilation.without_graphs(parameters, context.device)
            kernels = replace(kernels, compiled=choice.mode, cuda_graphs=False)
            transform("compile", engine.module, replace(build, compiled=choice.mode, cuda_graphs=False))
    warm_up.settle_buckets(engine, batches, objective)
    run = Run(
        out, parameters, architecture, objective, vocabulary, engine.module, length, context,
        tokenizer_folder=tokenizer_folder, holds_whole_model=engine.full_module,
        weight_shards=engine.weight_shards, optimizer_shards=partial(optimizer_shards, engine), run_log=run_log,
        validation_rows=stores.hash_validation(parameters.evaluation.batches if parameters.evaluation else 0),
    )  # fmt: skip
    _check_schedules(plan, run)
    _report_run(run, plan, stores, kernels, parameter_counts)
    return Trainer(
        run, engine, batches, validation,
        facts={
            **_manifest_facts(run, plan, stores, kernels, built, engine),
            "trained_parameter_count": trained_count,
            "started_from": None if built.started is None else built.started.facts,
        },
        shapes=shapes,
        throughputs=throughputs,
    )  # fmt: skip


def _report_weights(
    built: InitialModule, parameters: Parameters, plan: RunPlan, run_log: RunLog, *, fresh: bool
) -> None:
    """Says which weights were read, and which stay randomly initialised."""
    if built.obstacle is not None:
        obstacle = built.obstacle
        run_log.warn(f"every process builds the whole model before it keeps its part: {obstacle}")
    for note in built.started.notes if built.started is not None else ():
        run_log.print(note)
    if fresh and parameters.frozen_layers >= 0 and parameters.start_from is None:
        run_log.warn(
            f"frozen_layers {parameters.frozen_layers} without start_from: the frozen weights stay randomly initialised"
        )
    bound = parameters.architecture.max_sequence_length()
    longest = max(phase.sequence_length for phase in plan.phases)
    if fresh and built.started is None and longest < (bound or 0) and has_learned_positions(built.module):
        run_log.print(
            f"rows have at most {longest} tokens, so the model's positions from there to {bound} stay random: lower "
            f"architecture.max_position_embeddings to {longest}, unless another run goes on with longer rows"
        )


def _check_schedules(plan: RunPlan, run: Run) -> None:
    """Says where a warm-up does not end, and where the learning rate stays high. Raises UserError if the schedule of a
    phase does not fit it."""
    for phase in plan.phases:
        phase.check_schedule(run.progress())
        if (cut := phase.find_cut_warmup(run.progress())) is not None:
            unit, warmup, end = cut
            reached = f"{end / warmup:.0%}"
            run.print(
                f"schedule: the warm-up of {warmup:,} {unit} ends after the {end:,} that are trained: the learning "
                f"rate reaches {reached} of its peak at most"
            )
    if (share := plan.phases[-1].final_share(run.progress())) is not None and share > TRUNK:
        run.print(
            f"schedule: the learning rate ends at {share:.0%} of its peak: a trunk, whose models get better in a "
            "decay, which `terakoya fork` begins"
        )


def _report_run(run: Run, plan: RunPlan, stores: Stores, kernels: Kernels, parameter_counts: str) -> None:
    """Says what is trained on what, how, and for how long."""
    parameters, context, loader, length = run.parameters, run.context, plan.loader, plan.length
    if context.device.type == "cpu" and torch.backends.mps.is_available():
        run.print(
            "Apple's GPU (MPS) is not used: losses are added up in float64, which it does not have; trains on the CPU"
        )
    for text in precision_problems(parameters.precision, context.device):
        run.warn(text)
    tokens = sum(store.facts.tokens for store in stores.train)
    first = plan.phases[0]
    rank_batch = first.rank_batch
    epoch_rows = sum(len(source) for source in loader.sources if source.sequence_length == first.sequence_length)
    backend, compiled = kernels.attention, kernels.compiled
    how = f"{compiled} with CUDA graphs" if kernels.cuda_graphs else compiled
    run.print(
        f"{translated(context.topology.describe())} on {context.device.type}, {parameters.parallel.describe()}, "
        f"{parameters.precision}, attention {backend}, compile {how}; {parameter_counts}; {tokens:,} tokens in "
        f"{epoch_rows:,} rows of {first.sequence_length}; {rank_batch.global_rows} rows a step, "
        f"{rank_batch.micro_steps} micro-step{'s' if rank_batch.micro_steps > 1 else ''} of "
        f"{rank_batch.micro_batch_size}; {length.describe()}"
    )
    if plan.has_phases:
        for phase in plan.phases:
            run.print(phase.describe())
    if length.rows is not None and len(loader.sources) > 1:
        positions = zip(loader.sources, loader.store_positions(length.rows), strict=True)
        epochs = ", ".join(f"{int(each['rows']) / len(source):.2f} x {each['store']}" for source, each in positions)
        run.print(f"in its {length.rows:,} rows the run reads {epochs}")


def _manifest_facts(
    run: Run, plan: RunPlan, stores: Stores, kernels: Kernels, built: InitialModule, engine: Engine
) -> dict[str, Any]:
    """Returns the values of a manifest that describe the run, as JSON."""
    parameters, context, length = run.parameters, run.context, run.length
    has_nccl = context.device.type == "cuda" and context.world_size > 1
    return {
        "parameters": parameters.dump(),
        "max_steps": length.steps,
        "max_tokens": length.tokens,
        "length_unit": length.unit,
        "parameter_count": built.parameter_count,
        "vocabulary": stores.vocabulary.model_dump(mode="json"),
        "stores": stores.fingerprints(),
        "plugins": record_plugins(registry(), parameters.dump(registry()), find_transforms(parameters)),
        "world": {
            "processes": context.world_size,
            "nodes": context.topology.processes_per_node(),
            "threads": torch.get_num_threads(),
            "device": context.device.type,
            "processor": describe_processor(context.device),
            "engine": parameters.parallel.engine,
            "compile": kernels.compiled,
            "cuda_graphs": kernels.cuda_graphs,
            **{key: each for copies in getattr(engine, "copies", ()) for key, each in copies.facts.items()},
            "deterministic": parameters.deterministic or context.device.type != "cuda",
            **({"nccl": nccl_algorithms.read_choice()} if has_nccl else {}),
        },
        "versions": {"python": platform.python_version(), **package_versions()},
        **({"phases": [phase.record() for phase in plan.phases]} if plan.has_phases else {}),
    }
