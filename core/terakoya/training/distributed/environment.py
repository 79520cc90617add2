"""Sets a launcher's variables for libraries that read them: where no launcher did, or only for a while.

The variables are always restored afterwards: this process may start others, or train again in another way.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def launcher_variables(rank: int, world_size: int, local_rank: int) -> Iterator[None]:
    """Sets a launcher's variables while the context is open; afterwards the environment is what it was before."""
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    if world_size == 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def local_rank_variable(local_rank: int) -> Iterator[None]:
    """Sets LOCAL_RANK while the context is open: the one variable that DeepSpeed reads in every step."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Makes `torch.compile` return functions as they are while the context is open."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
