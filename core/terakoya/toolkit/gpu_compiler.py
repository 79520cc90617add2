"""What writes kernels for a GPU: Triton, which torch's compiler uses, too."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

MIN_CAPABILITY = (7, 0)
"""The lowest compute capability for which Triton writes kernels."""


def missing_tools(device: torch.device) -> str | None:
    """Returns what is missing to write kernels for the GPU `device`; None where nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang), which Triton needs"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {MIN_CAPABILITY[0]}.0"
    return None
