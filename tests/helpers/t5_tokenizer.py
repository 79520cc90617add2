"""A folder with a tokenizer of T5's class, as Transformers saves it: rows end with `</s>`, and nothing begins them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import T5Tokenizer


def make_folder(folder: Path, words: Sequence[str], *, sentinels: int = 100) -> Path:
    """Saves a tokenizer with a piece for each of `words` and each of their characters. As in T5's vocabulary the
    highest id is that of `<extra_id_0>`, the one below that of `<extra_id_1>`."""
    characters = sorted({character for word in words for character in word})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(f"\u2581{word}", -3.0) for word in dict.fromkeys(words)]
    pieces += [(character, -9.0) for character in characters]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(sentinels))]
    T5Tokenizer(vocab=pieces, extra_ids=sentinels).save_pretrained(folder)
    return folder
