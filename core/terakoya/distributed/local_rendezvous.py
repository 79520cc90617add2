"""The store at which the processes of one machine meet: it listens on the loopback interface alone.

torch's own listens on every interface of the machine, and any program that connects can read and write it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator

import torch.distributed as dist

from terakoya.distributed.topology import LaunchInfo
from terakoya.errors import UserError

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""The variable by which torch knows that another than rank 0 of the processes holds the store."""

_stores: list[dist.TCPStore] = []
"""The stores of this process: they end with it."""


@contextlib.contextmanager
def local_rendezvous(launch: LaunchInfo) -> Iterator[None]:
    """While the context is open, processes that meet at a loopback address do so at a store that only this machine
    reaches; rank 0 holds it. For other addresses torch's own store is used, and where torchrun holds it, that one.
    Raises UserError if the port is in use."""
    address = os.environ.get("MASTER_ADDR", "")
    if launch.rank or launch.world_size == 1 or os.environ.get(AGENT_STORE_VARIABLE) == "True" or not _is_v4(address):
        try:
            yield
        except dist.DistNetworkError as error:  # torch's store
            if errno.errorcode[errno.EADDRINUSE] not in str(error):
                raise
            raise _port_in_use() from error
        return
    try:
        listener = socket.create_server((address, int(os.environ["MASTER_PORT"])))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _port_in_use() from error
    _stores.append(
        dist.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,  # libuv's takes no socket
        )
    )
    os.environ[AGENT_STORE_VARIABLE] = "True"
    try:
        yield
    finally:
        del os.environ[AGENT_STORE_VARIABLE]


def _port_in_use() -> UserError:
    return UserError(
        f"MASTER_PORT {os.environ['MASTER_PORT']}: another program of this machine uses the port at which the "
        "processes of the run are to meet; set another one for all of them (`terakoya train --processes N` finds one "
        "itself)"
    )


def _is_v4(address: str) -> bool:
    """Whether `address` is a loopback address in numbers: a name may mean several."""
    try:
        return ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return False
