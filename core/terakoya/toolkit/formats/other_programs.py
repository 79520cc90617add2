"""What exporters for other programs than Transformers share: their libraries, texts to compare with, the comparison."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.log import translated

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from transformers import PreTrainedTokenizerBase

TEXTS = (
    "図書館で借りた本を、電車の中で読み終えた。",
    "２０２６年１１月、ｶﾞｽ料金は１２,３４５円 (税込) になった。",
    "か\u3099き\u3099 ㍿ ①  二つの  空白",
    "It's 3.14 % of \"all\" the dogs' naïve work.",
    "😀 絵文字と 𠮷野家、그리고 العربية",
    "雨",
)
"""Plain text, and characters that programs often treat otherwise: full and half width, marks of their own, two spaces,
emoji, characters beyond 16 bits."""
TOLERANCE = 1e-4
"""How far outputs may be from the model's, relative to the largest output where that is above 1."""


def require_libraries(format: str, extra: str, modules: Sequence[str]) -> None:
    """Raises UserError, with what to install, if one of `modules` is not there."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'format {format}: needs {", ".join(missing)}: pip install "terakoya[{extra}]"')


def encode_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns `TEXTS` as one padded batch of tensors (B, T), as `tokenizer` makes it for its model."""
    return dict(tokenizer(list(TEXTS), padding=True, truncation=True, return_tensors="pt"))


def compare_outputs(
    program: str, name: str, got: ArrayLike, expected: ArrayLike, *, tolerance: float = TOLERANCE
) -> str:
    """Returns a sentence about how far the output `name` of `program` is from the model's. Raises UserError if that is
    further than `tolerance`, or the shape is another."""
    import numpy as np

    ours, theirs = np.asarray(expected, dtype=np.float64), np.asarray(got, dtype=np.float64)
    if theirs.shape != ours.shape:
        raise UserError(f"{program}: {name} have the shape {theirs.shape}, expected {ours.shape}")
    difference = float(np.abs(theirs - ours).max(initial=0) / max(1.0, np.abs(ours).max(initial=0)))
    if not difference <= tolerance:
        raise UserError(
            f"{program}: {name} differ from the model's by {difference:.1e}, expected at most {tolerance:.0e}; nothing "
            "was written"
        )
    return translated(f"compared with {program}: {name} differ by {difference:.1e} at most")
