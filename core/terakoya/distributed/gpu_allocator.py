"""Lets torch's memory on a GPU grow in place, so that it does not fall into pieces."""

from __future__ import annotations

import os

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads the settings of its allocator: the name since torch 2.9, and the one before."""


def let_segments_grow() -> None:
    """Sets `expandable_segments`, unless the environment sets the allocator. torch reads that when CUDA is first asked
    for anything, such as whether a card has bf16: so it is told, too. Memory that was allocated before stays as it is.

    Batches with other numbers of documents ask for other sizes. Blocks that cannot grow are left over, and memory runs
    out although enough is free.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0]] = settings = "expandable_segments:True"
        torch._C._accelerator_setAllocatorSettings(settings)
