"""What this family adds: spikes of the loss are found, after which a run may go back; steps are profiled; ranks that
hang are named; norms of the optimizer's state are logged, and logits are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components import EventPlugin
    from terakoya.distributed.rank_watch import RankWatch
    from terakoya.distributed.topology import Topology
    from terakoya.training.batches import BatchMaker
    from terakoya.training.run import Run
    from terakoya.training.step_health import StepJudge
    from terakoya.training.watches import StepTimer


@hookimpl
def register_watches() -> Mapping[str, Callable[..., Any]]:
    """Implements `terakoya.hookspecs.register_watches`."""
    return {"profile": _profile, "spikes": _spikes, "ranks": _ranks}


@hookimpl
def register_events() -> Mapping[str, type[EventPlugin]]:
    """Implements `terakoya.hookspecs.register_events`."""
    from terakoya_watch.logits import Logits
    from terakoya_watch.optimizer_state import OptimizerState

    return {"logits": Logits, "optimizer_state": OptimizerState}


def _profile(run: Run, batches: BatchMaker) -> StepTimer:
    from terakoya_watch.step_profile import StepProfile

    return StepProfile(run)


def _spikes(run: Run, batches: BatchMaker) -> StepJudge:
    from terakoya_watch.spike_judge import SpikeJudge

    return SpikeJudge(run, batches)


def _ranks(topology: Topology, rank: int, timeout_seconds: int, meeting: str) -> RankWatch:
    from terakoya_watch.heartbeat import Heartbeat

    return Heartbeat(topology, rank, timeout_seconds, meeting)
