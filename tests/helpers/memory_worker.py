"""One of two processes that weighs what an engine holds. Each job is an object: `settings`, the parameter JSON; `out`,
a folder, which gets `RANK.json`:

    peak    the most bytes that torch's allocator had given out at once, in two optimizer steps after the engine stood
    first   the same of the first of them until it updates weights, and before there is optimizer state
    rest    bytes by part of what lies there between steps: weights, gradients, optimizer, what DeepSpeed keeps on the
            host for the next step if it is asked to, and all tensors together
    places  of each stage of a pipeline, whenever it begins a forward: how many places for what it receives have memory
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.rows.stores import Stores
from terakoya.training import setup
from terakoya.training.run_log import RunLog
from terakoya.training.trainer import Trainer
from terakoya_parallel.pipeline_stage import ReceivingStage

MARK = 7_919
"""Bytes that are given out to mark a moment, and never else."""
GLOO_THREAD = "pt_gloo"
"""How torch's names of the threads begin in which gloo works."""
UPDATED = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
"""What DeepSpeed names the weights that it updates."""


def weigh(job: dict[str, Any], context: DistributedContext) -> dict[str, Any]:
    """Trains two steps of one job and says what it held."""
    parameters = Parameters.from_dict(job["settings"], source="job")
    run_log = RunLog(Path(job["out"]), [], parameters.dump(), active=False)
    noted: list[int] = []
    gc.collect()
    before = storages(all_tensors())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:  # it must see what it sees go
        trainer = setup.build_trainer(parameters, Path(job["out"]), Stores.open(parameters.data), context, run_log)
        collecting(trainer)
        noting(trainer, noted)
        gc.collect()
        marking(trainer)
        for _ in range(2):
            trainer.one_step()
    gc.collect()
    optimizer: Any = trainer.engine.optimizer  # type: ignore[attr-defined] # every engine of ours has one
    states = [value for state in optimizer.state.values() for value in state.values()]
    rest = {
        "weights": size(storages(weights(trainer.engine)), without=before),
        "gradients": size(storages(gradients(trainer.engine)), without=before),
        "optimizer": size(storages(each for each in states if isinstance(each, Tensor)), without=before),
        "offloaded": size(storages(offloaded(trainer.engine)), without=before),
        "all": size(storages(all_tensors()), without=before),
    }
    _, first, second, last = most_at_once(profiler)
    return {"peak": max(first, second, last), "first": first, "rest": rest, "places": noted}


def most_at_once(profiler: profile, *, mapped: Collection[int] = ()) -> list[int]:
    """The most bytes that torch's allocator had given out at once, before, between and after the times when it gave out
    `MARK`. `profiler` profiles memory, and began before all that counts: it does not see the end of older things. Files
    of the sizes `mapped` are not counted: they are in memory only as far as they are read, and can leave it."""
    assert profiler.profiler is not None
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    live, most = 0, [0]
    for event in sorted(events, key=lambda each: each.start_ns()):
        if event.nbytes() == MARK:
            most.append(live)
        live += event.nbytes() if abs(event.nbytes()) not in mapped else 0
        most[-1] = max(most[-1], live)
    return most


def collecting(trainer: Trainer) -> None:
    """Has gloo's threads let go of their tensors and Python look for what nobody holds any more before each micro-step,
    so that chance does not say what lies around at the peak."""
    micro_step = trainer.engine.micro_step

    def after_collecting(*arguments: Any, **named: Any) -> Any:
        wait_for_gloo()
        gc.collect()
        return micro_step(*arguments, **named)

    trainer.engine.micro_step = after_collecting  # type: ignore[method-assign]


def marking(trainer: Trainer) -> None:
    """Marks this moment, and those in which weights begin to be updated."""
    step = trainer.engine.step

    def mark() -> None:
        torch.empty(MARK, dtype=torch.uint8)

    def marked(learning_rate: float, **options: float) -> Tensor:
        mark()
        return step(learning_rate, **options)

    trainer.engine.step = marked  # type: ignore[method-assign]
    mark()


def noting(trainer: Trainer, noted: list[int]) -> None:
    """Has the stages of a pipeline add to `noted` how many places they have, as they begin a forward."""
    if getattr(trainer.engine, "pipeline", None) is None:
        return
    forward = ReceivingStage.forward_one_chunk

    def counting(stage: Any, *inputs: Any, **named: Any) -> Any:
        infos = [each for all_of in (stage.args_recv_info, stage.grad_recv_info) for each in all_of.values()]
        buffers = [getattr(info, "buffer", None) for each in infos for info in each]
        noted.append(sum(buffer is not None for buffer in buffers))
        return forward(stage, *inputs, **named)

    ReceivingStage.forward_one_chunk = counting  # type: ignore[method-assign]


def let_go() -> None:
    """Has each collective that was waited for return once gloo's own thread has let go of its tensors. The profiler
    sees what this thread gives back alone: what that thread is the last to hold would count to the end of the run. DDP
    waits in C++: it sends no weights around, for here all have them, and begins a forward, in which it may take other
    buckets, once the threads have let go of those of the last backward."""
    wait, forward = Work.wait, DistributedDataParallel.forward

    def wait_and_let_go(*arguments: Any, **named: Any) -> Any:
        done = wait(*arguments, **named)
        wait_for_gloo()
        return done

    def let_go_and_forward(*arguments: Any, **named: Any) -> Any:
        wait_for_gloo()
        return forward(*arguments, **named)

    Work.wait = wait_and_let_go  # type: ignore[method-assign]
    DistributedDataParallel.forward = let_go_and_forward  # type: ignore[method-assign]
    assert hasattr(torch.nn.parallel.distributed, "_sync_module_states")
    torch.nn.parallel.distributed._sync_module_states = lambda **_: None


def wait_for_gloo() -> None:
    """Waits until the threads in which gloo works sleep. One that has just finished a collective still runs until it
    has let go of the tensors."""
    tasks = Path("/proc/self/task").iterdir()
    gloo = [each / "stat" for each in tasks if (each / "comm").read_text().startswith(GLOO_THREAD)]
    while any(each.read_text().rpartition(")")[2].split()[0] != "S" for each in gloo):
        time.sleep(0.001)


def weights(engine: Any) -> Iterable[Tensor]:
    """All tensors that hold weights: the module's, or their parts, and the ones that are updated."""
    for parameter in engine.module.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor
    yield from engine.module.buffers()
    for name in (*UPDATED, "param_buffer_of_bit16_for_cpu_offload_groups"):
        yield from getattr(getattr(engine, "zero", None), name, ())


def gradients(engine: Any) -> Iterable[Tensor]:
    """All gradients that weights have."""
    yield from (each.grad for each in engine.module.parameters() if each.grad is not None)


def offloaded(engine: Any) -> Iterable[Tensor]:
    """What DeepSpeed's own variables that are on the host with `offload_optimizer` and `offload_param` hold."""
    zero: Any = getattr(engine, "zero", None)
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        updated = [each for name in UPDATED for each in getattr(zero, name, ())]
        yield from updated
        yield from (each.grad for each in updated if each.grad is not None)
        yield from getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", ())
        yield from getattr(zero, "accumulated_grads_in_cpu", {}).values()
        for name in ("temp_grad_buffer_for_cpu_offload", "grad_partitions_flat_buffer"):
            if (buffer := getattr(zero, name, None)) is not None:
                yield buffer
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        yield from (each for each in states if isinstance(each, Tensor))
    if getattr(zero, "offload_param", False):
        yield from (parameter.ds_tensor for parameter in engine.module.parameters())


def all_tensors() -> Iterable[Tensor]:
    """Every tensor of this process that has data."""
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of what the tensors lie in, each counted once."""
    found = {}
    for each in tensors:
        with contextlib.suppress(RuntimeError):  # one whose storage is gone already, or a wrapper that has none
            storage = each.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def size(found: dict[int, int], *, without: dict[int, int]) -> int:
    """Bytes of all that was not there before."""
    return sum(each for address, each in found.items() if address not in without)


def run(jobs: Sequence[dict[str, Any]], context: DistributedContext) -> None:
    """Weighs the engine of each job."""
    let_go()
    gc.freeze()  # what is there by now is no job's, and need not be looked through each time
    for job in jobs:
        out = Path(job["out"])
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{context.rank}.json").write_text(json.dumps(weigh(job, context)))
        if context.heartbeat is not None:  # it holds the trainer, whose end the next job's profiler would see
            context.heartbeat.follow(step=lambda: 0, work=lambda: (0, 0.0))
