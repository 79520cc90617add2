"""JSON values in messages."""

from __future__ import annotations

import json
from typing import Any


def short_json(value: Any) -> str:
    """Returns `value` as JSON, cut to at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def given_twice(where: str, key: str, first: Any, second: Any) -> str:
    return f'{where}: the key "{key}" is given twice, as {short_json(first)} and as {short_json(second)}; keep one'
