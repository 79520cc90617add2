"""Facts about a host, collected over ssh before a run starts there: `python -m terakoya.launch.host_facts REQUEST`.

Prints one line of JSON. `--interface PEER` prints the network interface with the route to PEER, for scripts.
"""

from __future__ import annotations

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

PACKAGES = ("terakoya", "torch")
NEARBY_PORTS = 100
"""How many ports after a port in use are tried, to suggest a free one."""
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
        "cores": len(os.sched_getaffinity(0)),
        "gpus": sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*")),
        "unknown_names": [name for name in names if not _resolves(name)],
        "missing": [path for path in paths if not Path(path).exists()],
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            print(json.dumps({"port": error.strerror, "free_port": _free_port_after(port)}), flush=True)  # noqa: T201
            return
        listener.listen()
        print(json.dumps({"port": None}), flush=True)  # noqa: T201
        end = time.monotonic() + seconds
        for _ in range(callers):
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return
            with connection:
                connection.settimeout(1.0)
                try:
                    connection.recv(1)  # the caller closes first, so that the port is free again at once
                except OSError:
                    continue


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
    request = json.loads(arguments[0])
    port = request.pop("listen", None)
    print(json.dumps(collect_facts(**request)), flush=True)  # noqa: T201
    if port is not None:
        listen(**port)


if __name__ == "__main__":
    main(sys.argv[1:])
