"""Garbage collections that pass over what a process has imported.

`train` asks with `gc.get_freeze_count` whether anything is frozen, which counts all of it one by one: a tenth of a
second for the million objects of a test process, a fifth of a toy run.
"""

from __future__ import annotations

import gc

count = gc.get_freeze_count


def freeze() -> None:
    """Freezes what there is for the rest of this process, and says from now on that there is some without counting."""
    gc.freeze()
    gc.get_freeze_count = lambda: 1
