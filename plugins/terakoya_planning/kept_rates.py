"""Rates of runs on this machine: what determines them, a file that keeps those that were measured, and earlier runs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from terakoya.atomic_files import write_text
from terakoya.config.parameters import Parameters
from terakoya.distributed.topology import host_name
from terakoya.errors import FileError, UserError
from terakoya.process_pool import available_cores
from terakoya.runs import metrics
from terakoya.runs.files import read_object
from terakoya.toolkit.fast_products import describe_processor
from terakoya.version import __version__
from terakoya_planning.probe import Probed
from terakoya_planning.step_rate import StepRate

WITHOUT_EFFECT = (
    "batch_size", "checkpoint", "data", "epochs", "evaluation", "events", "logging_steps", "loss_scaling",
    "max_consecutive_skipped_steps", "max_grad_norm", "max_minutes", "max_steps", "max_tokens", "micro_batch_size",
    "on_lost_node", "phases", "profile", "schedule", "seed", "spikes", "start_from", "trackers",
)  # fmt: skip
"""Keys of the parameters that do not change how long a micro-step or an update takes. The rows of a micro-batch and
their length do, and are facts of their own."""
LEAST_STEPS_OF_RUN = 10
"""Steps of an earlier run from which its rate is known."""


def threads_of(processes: int) -> int:
    """Returns the threads of each process of a run here: an equal share of the cores, unless OMP_NUM_THREADS is set."""
    if processes == 1:
        return torch.get_num_threads()
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else max(1, available_cores() // processes)


def machine_facts(processes: int) -> dict[str, Any]:
    """Returns what tells this machine from another, as far as the rate of a run in `processes` depends on it."""
    return {
        "processor": describe_processor(torch.device("cpu")), "cores": available_cores(),
        "threads": threads_of(processes),
        "torch": torch.__version__, "terakoya": __version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }  # fmt: skip


def rate_facts(parameters: Parameters, *, vocab_size: int, rows: int, processes: int) -> dict[str, Any]:
    """Returns what the rate of a run depends on beside the machine: its model, its objective, the kind of its
    optimizer, how it is computed, and the shape of its micro-batches of `rows` rows."""
    raw = {key: value for key, value in parameters.dump().items() if key not in WITHOUT_EFFECT}
    # a learning rate, a decay or betas take no time
    raw["optimizer"] = {name: value for name, value in raw["optimizer"].items() if not isinstance(value, float | list)}
    return raw | {
        "sequence_length": parameters.data.sequence_length, "vocab_size": vocab_size, "rows": rows,
        "processes": processes,
    }  # fmt: skip


class KeptRates:
    """The rates that were measured on a machine, in a JSON `file` of the user's cache: key of the machine -> its facts,
    and key of a run -> its rate."""

    def __init__(self, file: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "terakoya"
        self.file = file or cache / "rates.json"

    def find(self, machine: Mapping[str, Any], run: Mapping[str, Any]) -> Probed | None:
        """Returns the kept rate of a run with the facts `run`; None where none is kept."""
        kept = read_object(self.file).get(_key(machine), {}).get("rates", {}).get(_key(run))
        try:
            return kept and Probed(StepRate(**kept["seconds"]), kept["timed"])
        except (KeyError, TypeError):  # of a version that kept something else
            return None

    def keep(self, machine: Mapping[str, Any], run: Mapping[str, Any], probed: Probed) -> None:
        """Keeps a rate; where the cache cannot be written it is measured again next time."""
        content = read_object(self.file)
        here = content.setdefault(_key(machine), {"machine": dict(machine), "rates": {}})
        here["rates"][_key(run)] = {
            "seconds": asdict(probed.rate), "timed": probed.said, "date": time.strftime("%Y-%m-%d"),
            "run": f"{run['architecture']['type']}, {run['rows']} x {run['sequence_length']} tokens",
        }  # fmt: skip
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        except (OSError, FileError):
            return


def _key(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def seconds_of_run(folder: Path, parameters: Parameters, *, processes: int) -> float | None:
    """Returns the seconds of a step of the run in `folder`, its validations and checkpoints included; None where there
    is no run that this machine trained with the rows and the model of `parameters` for some steps.

    The time is that between the first and the last step of what the run did since it was last started.
    """
    try:
        written = metrics.read(folder).records
        earlier = Parameters.load(folder / "parameters.json")
        parameters = parameters.with_precision(earlier.precision)
    except (UserError, OSError):
        return None
    start = max((number for number, each in enumerate(written) if each.get("kind") == "start"), default=None)
    if start is None or not _is_same_run(written[start], earlier, parameters, processes):
        return None
    steps = [each for each in written[start:] if each.get("kind") == "step"]
    if len(steps) < 2 or steps[-1]["step"] - steps[0]["step"] < LEAST_STEPS_OF_RUN:
        return None
    first, last = steps[0], steps[-1]
    return float((last["time"] - first["time"]) / (last["step"] - first["step"]))


def _is_same_run(start: Mapping[str, Any], earlier: Parameters, parameters: Parameters, processes: int) -> bool:
    """Whether the run that wrote `start` was of these parameters, on this machine with its versions now."""
    world, here = start.get("world", {}), machine_facts(processes)
    place = (start.get("hosts"), world.get("processes"), world.get("threads"))
    versions = (start.get("versions", {}).get("torch"), start.get("versions", {}).get("terakoya"))
    if place != ([host_name()], processes, here["threads"]) or versions != (here["torch"], __version__):
        return False
    facts = [
        (each.batch_size, each.evaluation, each.phases, rate_facts(each, vocab_size=0, rows=0, processes=processes))
        for each in (earlier, parameters)
    ]
    return facts[0] == facts[1] and earlier.micro_batch_size == parameters.micro_batch_size
