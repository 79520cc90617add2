"""Which of a GPU's algorithms a run takes: those that return the same bits each time, or the fastest.

See docs/design/deterministic.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from terakoya.errors import UserError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable in which cuBLAS finds, when it starts, how it divides its workspace: with one of two values its products
are deterministic."""
NOTICE = (
    'deterministic: a resumed run goes on with the same bits; "deterministic": false gives that up, and is faster with '
    "flash attention"
)
REFUSAL = "does not have a deterministic implementation"
"""What torch says of an operation that it refuses."""


def choose(deterministic: bool) -> None:
    """Lets this process take `deterministic` algorithms only, or any; before the first product on the GPU.

    Only torch's strict mode reaches flash attention, which merely warns in the other. torch's compiler then tunes no
    reduction by its time either, which another process would tune otherwise.
    """
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # otherwise each new tensor is filled first, which finds mistakes and costs a pass over memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explain_refusals() -> Iterator[None]:
    """While open, turns torch's refusal of an operation into a UserError with advice."""
    try:
        yield
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        operation = str(error).partition(REFUSAL)[0].strip()
        raise UserError(
            f"on a GPU {operation} has no algorithm that returns the same bits each time; give "
            '"deterministic": false, with which a resumed run differs by rounding from one that was not stopped'
        ) from error
