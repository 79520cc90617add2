"""Which of NCCL's algorithms sum over GPUs: NCCL reads them from the environment when processes connect.

See docs/design/deterministic.md.
"""

from __future__ import annotations

import os

ALGORITHMS, PROTOCOLS = "NCCL_ALGO", "NCCL_PROTO"
"""NCCL's variables."""
NOT_IN_SWITCHES = "^NVLS,NVLSTree"
"""All algorithms but those in which NVSwitches add up, in another order each time. NCCL compares whole names, so the
one does not exclude the other."""


def sum_in_one_order() -> None:
    """Excludes the algorithms whose sums have no order, unless the environment chooses some. torch's deterministic mode
    excludes the first of them, and only where it is on before the first group is made."""
    os.environ.setdefault(ALGORITHMS, NOT_IN_SWITCHES)


def read_choice() -> dict[str, str]:
    """Returns the variables that are set, for a manifest: with other algorithms sums are rounded differently."""
    return {name: os.environ[name] for name in (ALGORITHMS, PROTOCOLS) if name in os.environ}
