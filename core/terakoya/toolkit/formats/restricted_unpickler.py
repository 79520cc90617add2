"""Reading what `torch.save` wrote elsewhere: tensors and plain values, never another program's objects.

Such files are pickles, and unpickling runs whatever a file asks for. Here torch's own restricted reader reads them, and
each object of a known training program becomes an `Stub` that holds the values it was made of.
"""

from __future__ import annotations

import argparse
import pickle
import types
from pathlib import Path
from typing import Any

from terakoya.errors import UserError

REAL: dict[str, type] = {"argparse.Namespace": argparse.Namespace, "types.SimpleNamespace": types.SimpleNamespace}
"""Read as what they are: they hold values and do nothing."""

STUBBED_PREFIXES = (
    "megatron.", "deepspeed.", "transformer_engine.", "apex.", "smdistributed.", "transformers.", "accelerate.",
    "numpy.", "torch.", "pathlib.", "enum.", "datetime.", "collections.", "signal.Signals", "functools.partial",
    "_io.BytesIO", "builtins.getattr",
)  # fmt: skip
"""What training programs put beside their weights, by the beginning of the name. None of it is imported or called."""


class Stub:
    """Stands for an object of another program: which one, and the values it was made of."""

    kind = ""
    """The full name of the class or function."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Stub:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.kind}{self.args}"


def load(file: Path) -> Any:
    """What `torch.save` wrote into `file`, tensors on the CPU and mapped from the file where its format allows.

    Raises:
        UserError: no such file, one that torch.save did not write, or one that asks for an object which is not known
            to be harmless; it is named.
    """
    import torch

    if not file.is_file():
        raise UserError(f"{file}: no such file")
    try:
        zipped = _is_zip(file)
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file) if zipped else []
        unknown = sorted(name for name in asked if name not in REAL and not name.startswith(STUBBED_PREFIXES))
        if unknown:
            raise UserError(
                f"{file}: asks for {', '.join(unknown[:5])}, which is not known to be harmless; nothing was read. "
                "Save the weights alone (tensors by name), or as safetensors, where the file comes from"
            )
        stand_ins: list[Any] = [(REAL.get(name) or _stand_in(name), name) for name in asked]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, OSError, KeyError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{file}: cannot be read as tensors and plain values: {reason}") from error


def _is_zip(file: Path) -> bool:
    """Whether the file has the format that torch writes since 1.6; the one before has no list of what it asks for."""
    with file.open("rb") as stream:
        return stream.read(2) == b"PK"


def _stand_in(name: str) -> type[Stub]:
    return type(name.rpartition(".")[2], (Stub,), {"kind": name})
