"""A training run with the fused kernels in Triton's interpreter, on a CPU: `interpreted_run.py PARAMETERS OUT`.

It is a process of its own with `TRITON_INTERPRET` set, since Triton reads it at its import. Ends with an error where
the run took no kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process
from terakoya_precision.fused import choice, ops


def main() -> None:
    """Trains with the kernels that a GPU's check would have let through."""
    given, out = (Path(each) for each in sys.argv[1:])
    parameters = Parameters.from_dict(json.loads(given.read_text()), source=str(given))
    with (
        mock.patch.object(choice, "choose", return_value=(True, None)),
        mock.patch.object(ops, "column_sums", wraps=ops.column_sums) as taken,
    ):
        train_in_this_process(parameters, out)
    assert taken.call_count >= parameters.max_steps, "no fused kernel ran"


if __name__ == "__main__":
    main()
