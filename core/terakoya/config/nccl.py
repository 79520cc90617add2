"""What NCCL and torch's watchdog of it print, keep and wait for: the key `parallel.nccl` of the parameter JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from terakoya.config.settings import Settings

FOLDER = "flight_recorder"
"""The folder of a run into which processes write what the flight recorder has kept."""


class Nccl(Settings):
    """Variables of NCCL and of torch for it, set in every process unless its environment has them already."""

    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL prints (`NCCL_DEBUG`): INFO names the network that it chooses; null sets nothing."""
    flight_recorder: NonNegativeInt = 0
    """How many collectives torch's flight recorder keeps in each process (`TORCH_FR_BUFFER_SIZE`); after a timeout each
    writes them to `flight_recorder/rank_N` in the run's folder, which `torchfrtrace` reads. 2000 is usual; 0 is none.
    Unit: collectives."""
    heartbeat_seconds: PositiveInt | None = None
    """After how long without a sign of life of torch's watchdog a process ends itself
    (`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`); null is torch's own time. Unit: seconds."""

    def variables(self, run: Path) -> Mapping[str, str]:
        """Returns the variables by name, for a run in the folder `run`."""
        recorder = {
            "TORCH_FR_BUFFER_SIZE": str(self.flight_recorder),
            "TORCH_FR_DUMP_TEMP_FILE": str(run.absolute() / FOLDER / "rank_"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }
        return {
            **({} if self.debug is None else {"NCCL_DEBUG": self.debug}),
            **(recorder if self.flight_recorder else {}),
            **(
                {}
                if self.heartbeat_seconds is None
                else {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(self.heartbeat_seconds)}
            ),
        }
