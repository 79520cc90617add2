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
"""The variable in which cuBLAS finds how it divides its workspace. Importing terakoya sets it where nobody has."""
WORKSPACES = (":4096:8", ":16:8")
"""Its values with which products are deterministic."""
NOTICE = (
    'deterministic: only algorithms that return the same bits each time; "deterministic": false also allows faster '
    "ones, and a resumed run then differs by rounding"
)
REFUSAL = "does not have a deterministic implementation"
"""What torch says of an operation that it refuses."""


def choose(deterministic: bool) -> None:
    """Lets this process take `deterministic` algorithms only, or any. Raises UserError if the environment tells cuBLAS
    otherwise.

    Only torch's strict mode reaches flash attention, which merely warns in the other. torch's compiler then divides no
    sum by what it has timed, which another process may time otherwise.
    """
    workspace = os.environ.get(CUBLAS_WORKSPACE, "")
    if deterministic and workspace not in WORKSPACES:
        raise UserError(
            f'{CUBLAS_WORKSPACE} is "{workspace}": expected one of {", ".join(WORKSPACES)}, with which products on a '
            'GPU are deterministic; set it before the program starts, or give "deterministic": false'
        )
    torch.use_deterministic_algorithms(deterministic)
    # otherwise each new tensor is filled first, which finds mistakes and costs a pass over memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def restore_choice() -> Iterator[None]:
    """At its end this process takes the algorithms that it took before: what follows a training may need others."""
    filling = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = filling.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextmanager
def explain_refusals() -> Iterator[None]:
    """While open, turns torch's refusal of an operation into a UserError with advice."""
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(REFUSAL)
        if found:
            raise UserError(
                f"on a GPU {operation.strip()} has no algorithm that returns the same bits each time; give "
                '"deterministic": false, with which a resumed run differs by rounding from one that was not stopped'
            ) from error
        if CUBLAS_WORKSPACE in str(error):
            raise UserError(
                f"this program multiplied on the GPU before it imported terakoya, without {CUBLAS_WORKSPACE}="
                f'{WORKSPACES[0]}: import terakoya first, set the variable, or give "deterministic": false'
            ) from error
        raise
