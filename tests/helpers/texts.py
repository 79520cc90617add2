"""Texts in a file, and the ids that a tokenizer of Transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from terakoya.corpus.corpus import Corpus


def write_texts(file: Path, texts: Iterable[str]) -> Corpus:
    """The corpus of `texts`, which are written as JSON Lines."""
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return Corpus([file])


def ids_of_lines(tokenizer: Any, texts: Iterable[str], **options: Any) -> list[int]:
    """The ids of the lines of `texts`, each given to `tokenizer` alone."""
    lines = [line for text in texts for line in text.split("\n")]
    return [id for line in lines for id in tokenizer(line, add_special_tokens=False, **options)["input_ids"]]
