"""What became of a process that a signal ended, and whether it was the kernel, for want of memory."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

CONTAINER, MACHINE = "this container", "this machine"
COUNTED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def memory_kills(*, processes: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """How many processes the kernel has killed so far for want of memory: in this container (control group), and on
    this machine. What it does not tell, on other systems or where it is hidden, is not there."""
    lines = _text(processes / "self" / "cgroup").splitlines()
    paths = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    files = {
        CONTAINER: [
            *(groups / "memory" / paths[each] / "memory.oom_control" for each in paths if "memory" in each.split(",")),
            *(groups / paths[each] / "memory.events" for each in paths if not each),
            groups / "memory.events",
        ],
        MACHINE: [processes / "vmstat"],
    }
    found = {}
    for place, candidates in files.items():
        counts = [int(match[1]) for file in candidates if (match := COUNTED.search(_text(file)))]
        if counts:
            found[place] = max(counts)
    return found


def explained(rank: int, code: int, before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """What to say of process `rank` that ended with `code` (minus a signal's number), `before` and `after` being what
    `memory_kills` counted; None where it ended by itself."""
    if code >= 0:
        return None
    said = f"process {rank} was ended by signal {-code} ({signal.Signals(-code).name})"
    if -code != signal.SIGKILL:
        return said
    places = [place for place in (CONTAINER, MACHINE) if after.get(place, 0) > before.get(place, 0)]
    advice = "`terakoya estimate` says what a run takes and what takes most; a smaller micro_batch_size takes less"
    if places:
        return f"{said}: {places[0]} is out of memory, and the kernel killed a process for it. {advice}"
    if not after:
        return f"{said}; on Linux that is most often the kernel, out of memory. {advice}"
    return f"{said}, but not by the kernel for want of memory: it counts no such kill. Somebody, or a scheduler, did it"


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
