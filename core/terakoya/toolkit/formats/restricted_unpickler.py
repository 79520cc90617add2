"""Reading `torch.save` files of other programs: tensors and plain values, never another program's objects.

Such files are pickles, and unpickling runs any code that a file names. torch's own restricted reader reads them here,
and each object of a known training program becomes a `Stub` with the values from which it was made.
"""

from __future__ import annotations

import argparse
import pickle
import types
from pathlib import Path
from typing import Any

from terakoya.errors import UserError

SAFE_CLASSES: dict[str, type] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
"""Classes that are created as they are: they only hold values."""

STUBBED_PREFIXES = (
    "megatron.", "deepspeed.", "transformer_engine.", "apex.", "smdistributed.", "transformers.", "accelerate.",
    "numpy.", "torch.", "pathlib.", "enum.", "datetime.", "collections.", "signal.Signals", "functools.partial",
    "_io.BytesIO", "builtins.getattr",
)  # fmt: skip
"""Beginnings of the names of objects that training programs save together with weights. None is imported or called."""


class Stub:
    """Replaces an object of another program: its name, and the values from which it was made."""

    qualified_name = ""
    """The full name of the class or function."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Stub:
        stub = super().__new__(cls)
        stub.args, stub.state = args, None
        return stub

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.qualified_name}{self.args}"


def load(file: Path) -> Any:
    """Returns the content of `file`, which `torch.save` wrote: tensors on the CPU, memory-mapped where the format
    allows. Raises UserError if there is no such file, torch.save did not write it, or it names an object that is not
    known to be harmless; the message contains that name."""
    import torch

    if not file.is_file():
        raise UserError(f"{file}: no such file")
    try:
        zipped = _is_zip(file)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if zipped else []
        unknown = sorted(name for name in names if name not in SAFE_CLASSES and not name.startswith(STUBBED_PREFIXES))
        if unknown:
            raise UserError(
                f"{file}: contains {', '.join(unknown[:5])}, which is not known to be harmless; nothing was read. "
                "In the program that wrote it, save only the weights (tensors by name), or save them as safetensors"
            )
        classes: list[Any] = [(SAFE_CLASSES.get(name) or _make_stub(name), name) for name in names]
        with torch.serialization.safe_globals(classes):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, OSError, KeyError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{file}: cannot be read as tensors and plain values: {reason}") from error


def _is_zip(file: Path) -> bool:
    """Returns whether the file has the format of torch 1.6 and later; the older format has no list of the names in
    it."""
    with file.open("rb") as stream:
        return stream.read(2) == b"PK"


def _make_stub(name: str) -> type[Stub]:
    return type(name.rpartition(".")[2], (Stub,), {"qualified_name": name})
