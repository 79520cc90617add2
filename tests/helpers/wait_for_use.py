"""A module whose import, in the fork server that `fork_server.share` starts, waits until a process needs the server.

The server does without the terminal of pytest: what it forks writes into files, or nowhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import fork_server

parent, _, wanted = os.environ.pop(fork_server.WANTED).partition(" ")
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
os.close(nowhere)
while not Path(wanted).exists():
    if os.getppid() != int(parent):
        raise SystemExit
    time.sleep(0.05)
