"""Measures the speed of a run on this machine, in as many processes as it will have: `measure_here`."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from terakoya.config import batch_table
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo, RankBatch
from terakoya.errors import UserError
from terakoya.launch.local import run_processes
from terakoya.process_pool import available_cores
from terakoya_planning.kept_rates import KeptRates, machine_facts, rate_facts
from terakoya_planning.probe import SECONDS, Probed, probe
from terakoya_planning.speed import Speed, measured_speed
from terakoya_planning.step_rate import StepRate

START_SECONDS = 8.0
"""What several processes take of a probe's time to start and to import torch, about."""

log = logging.getLogger("terakoya")


def measure_here(parameters: Parameters, vocab_size: int, share: RankBatch, processes: int) -> Speed | None:
    """Returns the speed of a run on this machine: as kept, or from steps that are timed now and kept for the next time.

    None where this machine cannot take such steps: it has fewer devices, another program has started this process among
    others, the run has several nodes or stages of a pipeline, its steps are too slow, or they failed, which is logged.
    """
    there = torch.cuda.device_count() or available_cores()
    alone = LaunchInfo.from_environment(node_rank=None).launcher is None
    if len(batch_table.node_names(parameters.batch_size)) > 1 or parameters.parallel.pp_size > 1:
        return None
    if processes > there or not alone:
        return None
    machine = machine_facts(processes)
    run = rate_facts(parameters, vocab_size=vocab_size, rows=share.micro_batch_size, processes=processes)
    rates = KeptRates()
    probed = rates.find(machine, run)
    if probed is None:
        try:
            probed = _probe(parameters, vocab_size, share, processes)
        except (UserError, torch.OutOfMemoryError) as error:
            log.warning("the speed is not measured: %s", error)
        if probed is None:
            return None
        rates.keep(machine, run, probed)
    return measured_speed(probed, share)


def _probe(parameters: Parameters, vocab_size: int, share: RankBatch, processes: int) -> Probed | None:
    if processes == 1:
        return _probe_in_this_process(parameters, vocab_size, share.micro_batch_size, share.micro_steps, SECONDS)
    with tempfile.TemporaryDirectory(prefix="terakoya-measuring-") as folder:
        question, answer = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked = [parameters.dump(), vocab_size, share.micro_batch_size, share.micro_steps]
        question.write_text(json.dumps(asked), encoding="utf-8")
        code = run_processes([str(question), str(answer)], processes, module=__name__, quiet=True)
        if code:
            raise UserError(f"{processes} processes that took steps ended with exit code {code}")
        found: dict[str, Any] | None = json.loads(answer.read_bytes())
        return None if found is None else Probed(StepRate(**found["rate"]), found["said"])


def _probe_in_this_process(
    parameters: Parameters, vocab_size: int, rows: int, micro_steps: int, seconds: float, answer: Path | None = None
) -> Probed | None:
    parallel = parameters.parallel
    launch = LaunchInfo.from_environment(node_rank=None)
    with connect(launch, replica_size=parallel.replica_size, timeout_seconds=parallel.timeout_seconds) as context:
        found = probe(parameters, context, vocab_size=vocab_size, rows=rows, micro_steps=micro_steps, seconds=seconds)
        if answer is not None and context.is_main:
            answer.write_text(json.dumps(None if found is None else asdict(found)), encoding="utf-8")
        return found


def main() -> None:
    """One of several processes that take steps together: `python -m terakoya_planning.measuring QUESTION ANSWER`."""
    question, answer = map(Path, sys.argv[1:])
    raw, vocab_size, rows, micro_steps = json.loads(question.read_bytes())
    parameters = Parameters.from_dict(raw, source=question.name)
    _probe_in_this_process(parameters, vocab_size, rows, micro_steps, SECONDS - START_SECONDS, answer)


if __name__ == "__main__":
    main()
