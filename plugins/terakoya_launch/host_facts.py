"""Facts about a host, collected before a run starts there: `python -m terakoya_launch.host_facts REQUEST`.

Prints one line of JSON. `--in-job REQUEST` does the same on each node of a scheduler's job. `--interface PEER` prints
the network interface with the route to PEER, for scripts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from terakoya.process_pool import available_cores

PACKAGES = ("terakoya", "torch")
NEARBY_PORTS = 100
"""How many ports after a port in use are tried, to suggest a free one."""
STORE = "store.json"
"""The file of a token store that has the hashes of all others."""
JOB_SECONDS = 60.0
"""How long the nodes of a job wait for each other: the scheduler may start them one after another."""
CALL_SECONDS = 5.0
"""Timeout of a connection to the first host."""


def collect_facts(
    *,
    peer: str | None = None,
    interface: str | None = None,
    names: Sequence[str] = (),
    paths: Sequence[str] = (),
    call: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Returns facts about this host: versions, cores, GPUs, network interface, host names, files, clock.

    Args:
        peer: another host, to find the interface with the route to it. None if there is no other host.
        interface: the interface to check instead of the one with the route to `peer`.
        names: host names that should resolve.
        paths: files that should exist.
        call: a host and a port that should accept a connection.
    """
    result: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), **_versions()},
        "cores": available_cores(),
        "gpus": sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*")),
        "unknown_names": [name for name in names if not _resolves(name)],
        "missing": [path for path in paths if not Path(path).exists()],
        "contents": {
            path: hashlib.sha256(file.read_bytes()).hexdigest()
            for path in paths
            if (file := Path(path) / STORE).is_file()
        },
        **_network(peer, interface),
        "call": None if call is None else _call(str(call[0]), int(call[1])),
    }
    return {**result, "clock": time.time()}  # last: the receiver compares it with the time of arrival


def interface_to(peer: str) -> tuple[str, str]:
    """Returns the name and the address of the interface with the route to `peer`. OSError if there is no route."""
    import psutil

    family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: it only looks up the route
        address = probe.getsockname()[0].partition("%")[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name, address
    raise OSError(f"no interface has the address {address}, the source address of packets to {peer}")


def listen(port: int, *, callers: int, seconds: float) -> None:
    """Prints a line of JSON: whether `port` is free on this host, and if not, another port that is. Then accepts up to
    `callers` connections within `seconds`."""
    with socket.socket() as listener:
        if (refused := _bind(listener, port)) is not None:
            print(json.dumps({"port": refused, "free_port": _free_port_after(port)}), flush=True)  # noqa: T201
            return
        print(json.dumps({"port": None}), flush=True)  # noqa: T201
        _accept(listener, callers, time.monotonic() + seconds)


def _bind(listener: socket.socket, port: int) -> str | None:
    """Lets `listener` listen on the port; returns the error, None on success."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
    except OSError as error:
        return error.strerror
    listener.listen()
    return None


def _accept(listener: socket.socket, callers: int, end: float) -> str | None:
    """Tells each caller the time of this host, until all have called or the monotonic time `end`; returns the address
    of the last one."""
    peer = None
    for _ in range(callers):
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, (peer, *_) = listener.accept()
        except TimeoutError:
            break
        with connection:
            connection.settimeout(CALL_SECONDS)
            with contextlib.suppress(OSError):
                connection.sendall(f"{time.time()}\n".encode())
                connection.recv(1)  # the caller closes first, so that the port is free again at once
    return peer


def collect_in_job(*, nodes: int, seconds: float = JOB_SECONDS, **request: Any) -> dict[str, Any]:
    """Returns the facts of this node of a job, after the other nodes have connected to the first one on the port where
    its processes would meet: `rank` and, beside what `collect_facts` returns, `call` (the error, None on success) and
    `offset`, by how many seconds the clock is ahead of the first node's; on the first one `tried_port`, and in `port`
    the error of listening there.

    The variables are those of the job's script: GROUP_RANK or SLURM_NODEID, MASTER_ADDR and MASTER_PORT.
    """
    rank = int(os.environ.get("GROUP_RANK") or os.environ["SLURM_NODEID"])
    first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + seconds
    if rank == 0:
        with socket.socket() as listener:
            refused = _bind(listener, port)
            peer = _accept(listener, nodes - 1, end) if refused is None else None
        return {"rank": 0, **collect_facts(peer=peer, **request), "port": refused, "tried_port": port, "offset": 0.0}
    offset, error = None, None
    while offset is None and time.monotonic() < end:
        offset, error = _read_clock(first, port)
        time.sleep(0 if offset is not None else 0.5)  # the first node may start later
    return {"rank": rank, **collect_facts(peer=first, names=[first], **request), "call": error, "offset": offset}


def _read_clock(host: str, port: int) -> tuple[float | None, str | None]:
    """Connects to the port; returns by how much this clock is ahead of the host's, or the error."""
    try:
        with socket.create_connection((host, port), timeout=CALL_SECONDS) as connection:
            return time.time() - float(connection.makefile().readline()), None
    except TimeoutError:
        return None, f"no answer in {CALL_SECONDS:.0f} s"
    except (OSError, ValueError) as error:
        return None, getattr(error, "strerror", None) or str(error)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _network(peer: str | None, interface: str | None) -> Mapping[str, Any]:
    """Returns `interface` and `address`, or `interface_error`."""
    import psutil

    if interface is None:
        if peer is None:
            return {"interface": None, "address": None}
        try:
            name, address = interface_to(peer)
        except OSError as failure:
            return {"interface": None, "address": None, "interface_error": f"no route to {peer}: {failure}"}
        return {"interface": name, "address": address}
    interfaces = psutil.net_if_addrs()
    addresses = [
        entry.address
        for entry in interfaces.get(interface, ())
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
    ]
    error = None
    if interface not in interfaces:
        error = f"there is no interface {interface}; it has {', '.join(sorted(interfaces))}"
    elif not psutil.net_if_stats()[interface].isup:
        error = f"the interface {interface} is down"
    elif not addresses:
        error = f"the interface {interface} has no address"
    return {"interface": interface, "address": addresses[0] if addresses else None, "interface_error": error}


def _call(host: str, port: int) -> str | None:
    """Connects to the port; returns the error, None on success."""
    try:
        with socket.create_connection((host, port), timeout=CALL_SECONDS):
            return None
    except TimeoutError:
        return f"no answer in {CALL_SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)


def _free_port_after(port: int) -> int | None:
    for other in range(port + 1, min(port + 1 + NEARBY_PORTS, 1 << 16)):
        with socket.socket() as probe:
            try:
                probe.bind(("", other))
            except OSError:
                continue
            return other
    return None


def main(arguments: Sequence[str]) -> None:
    """Handles a request: JSON with the arguments of `collect_facts` and, under `listen`, those of `listen`."""
    if arguments[0] == "--interface":
        print(interface_to(arguments[1])[0])  # noqa: T201
        return
    if arguments[0] == "--in-job":
        print(json.dumps(collect_in_job(**json.loads(arguments[1]))), flush=True)  # noqa: T201
        return
    request = json.loads(arguments[0])
    port = request.pop("listen", None)
    print(json.dumps(collect_facts(**request)), flush=True)  # noqa: T201
    if port is not None:
        listen(**port)


if __name__ == "__main__":
    main(sys.argv[1:])
