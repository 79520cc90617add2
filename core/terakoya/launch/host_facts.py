"""Facts about a host, asked over ssh before anything starts there: `python -m terakoya.launch.host_facts REQUEST`.

Prints one line of JSON. `--interface PEER` prints the name of the network interface that leads to PEER, for scripts.
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
"""How many ports behind a taken one are tried, to name one that is free."""
CALL_SECONDS = 5.0
"""How long a call to the first host may take."""


def collect_facts(
    *,
    peer: str | None = None,
    interface: str | None = None,
    names: Sequence[str] = (),
    paths: Sequence[str] = (),
    call: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """What this host has and sees.

    Args:
        peer: another host; the interface that leads there is looked up. None where there is no other.
        interface: the interface to look at, if it is not the one that leads to `peer`.
        names: hosts whose names should mean something here.
        paths: files that should be there.
        call: a host and a port that should answer.
    """
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), **_versions()},
        "cores": len(os.sched_getaffinity(0)),
        "gpus": sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*")),
        "unknown_names": [name for name in names if not _resolves(name)],
        "missing": [path for path in paths if not Path(path).exists()],
        **_network(peer, interface),
        "call": None if call is None else _call(str(call[0]), int(call[1])),
    }
    return {**found, "clock": time.time()}  # last: it is compared with the moment when it arrives


def interface_to(peer: str) -> tuple[str, str]:
    """The name and the address of the interface that packets to `peer` leave by. OSError where nothing leads there."""
    import psutil

    family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: the route is looked up
        address = probe.getsockname()[0].partition("%")[0]
    for name, given in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in given):
            return name, address
    raise OSError(f"no interface has the address {address}, from which packets to {peer} leave")


def listen(port: int, *, callers: int, seconds: float) -> None:
    """Prints a line of JSON that says whether `port` is free here, and another that is if it is not; then answers
    `callers` calls, or as many as come in `seconds`."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            print(json.dumps({"port": error.strerror, "free_port": _free_port_behind(port)}), flush=True)  # noqa: T201
            return
        listener.listen()
        print(json.dumps({"port": None}), flush=True)  # noqa: T201
        end = time.monotonic() + seconds
        for _ in range(callers):
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                return
            with caller:
                caller.settimeout(1.0)
                try:
                    caller.recv(1)  # the caller hangs up first: the port is free again at once
                except OSError:
                    continue


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _network(peer: str | None, interface: str | None) -> Mapping[str, Any]:
    """`interface` and its `address`, or `interface_error`."""
    import psutil

    if interface is None:
        if peer is None:
            return {"interface": None, "address": None}
        try:
            name, address = interface_to(peer)
        except OSError as error:
            return {"interface": None, "address": None, "interface_error": f"nothing leads to {peer}: {error}"}
        return {"interface": name, "address": address}
    given = psutil.net_if_addrs()
    addresses = [
        each.address
        for each in given.get(interface, ())
        if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80:")
    ]
    wrong = None
    if interface not in given:
        wrong = f"there is no interface {interface}; it has {', '.join(sorted(given))}"
    elif not psutil.net_if_stats()[interface].isup:
        wrong = f"the interface {interface} is down"
    elif not addresses:
        wrong = f"the interface {interface} has no address"
    return {"interface": interface, "address": addresses[0] if addresses else None, "interface_error": wrong}


def _call(host: str, port: int) -> str | None:
    """What went wrong with a connection to the port; None if nothing did."""
    try:
        with socket.create_connection((host, port), timeout=CALL_SECONDS):
            return None
    except TimeoutError:
        return f"no answer in {CALL_SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)


def _free_port_behind(port: int) -> int | None:
    for other in range(port + 1, min(port + 1 + NEARBY_PORTS, 1 << 16)):
        with socket.socket() as probe:
            try:
                probe.bind(("", other))
            except OSError:
                continue
            return other
    return None


def main(arguments: Sequence[str]) -> None:
    """Answers the request: JSON with the arguments of `facts` and, under `listen`, those of `listen`."""
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
