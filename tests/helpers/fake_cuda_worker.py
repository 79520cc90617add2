"""Takes training steps on fake_cuda's machine: fake_cuda_worker.py OUT '{"NAME": PARAMETERS}' prints what it saw."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import fake_cuda

from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.training.distributed.context import connect
from terakoya.training.distributed.topology import LaunchInfo
from terakoya.training.dry_run import dry_run
from terakoya.training.run_log import RunLog
from terakoya.training.setup import build_trainer
from terakoya.training.stores import Stores


def take_steps(parameters: Parameters, out: Path) -> dict[str, Any]:
    """A dry run, then two steps of a run, of which the second is not logged."""
    with fake_cuda.machine() as machine:
        dry_run(parameters, out)
        context = connect(LaunchInfo.from_environment())
        run_log = RunLog(out, (), {}, active=False)
        trainer = build_trainer(parameters, out, Stores.open(parameters.data), context, run_log, registry())
        trainer.one_step()
        machine.places.clear()
        before = machine.operations
        trainer.one_step()
        return {
            "device": str(context.device),
            "flash": trainer.flash,
            "waits": machine.places,
            "operations": machine.operations - before,
        }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    seen = {}
    for name, settings in json.loads(sys.argv[2]).items():
        with contextlib.redirect_stdout(sys.stderr):
            seen[name] = take_steps(Parameters.from_dict(settings, source=name), out)
    sys.stdout.write(json.dumps(seen))
