"""The place where the hosts of a run find each other, on a machine that is none of them:
`python -m terakoya_launch.rendezvous_store PORT`.

It is torch's own key-value store, which torchrun's agents use as they use that of the first host otherwise. It runs
until SIGTERM or Ctrl-C, serves any number of runs, and keeps nothing on disk.
"""

from __future__ import annotations

import signal
import sys
import threading

from terakoya.errors import UserError


def serve(port: int) -> None:
    """Serves the store on `port` until a stop signal. Raises UserError if the port cannot be used."""
    from torch.distributed import TCPStore

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise UserError(f"port {port}: cannot be used ({error}); choose another") from error
    print(f"hosts find each other on port {store.port}; Ctrl-C ends it", flush=True)  # noqa: T201
    stopped.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("expected a port: python -m terakoya_launch.rendezvous_store 29400")
    try:
        serve(int(sys.argv[1]))
    except UserError as failed:
        sys.exit(f"error: {failed}")
