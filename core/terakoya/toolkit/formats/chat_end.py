"""The token with which a tokenizer's chat template ends an answer. A model that chats stops there, also where its
documents end with another one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.process_pool import time_limit
from terakoya.toolkit.tokenizers.line_encoder import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_SECONDS = 10.0
"""Time in which a chat template writes a conversation; real ones take milliseconds."""
_QUESTION, _ANSWER = "ppquestionqq", "ppanswerqq"

logger = logging.getLogger("terakoya")


def find_chat_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id of the first special token after an answer; None without a chat template, or with one that has
    none there or writes no question with its answer, which is logged."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        with time_limit(TEMPLATE_SECONDS):
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TimeoutError, TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        logger.warning("the end of an answer is not known: the tokenizer's chat template cannot be used: %s", error)
        return None
    literal = sorted(special_tokens(tokenizer), key=len, reverse=True)
    end = re.search("|".join(map(re.escape, literal)) or "(?!)", text.rpartition(_ANSWER)[2])
    return None if end is None else int(tokenizer.convert_tokens_to_ids(end[0]))


def add_chat_end(ends: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase) -> int | list[int] | None:
    """Returns `ends`, the ids at which a model stops, and the one that ends an answer of `tokenizer`."""
    known = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    end = find_chat_end(tokenizer)
    every = known if end is None or end in known else [*known, end]
    return every if len(every) > 1 else every[0] if every else None


def write_chat_end(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the end of an answer to `eos_token_id` in the generation_config.json of a model's `folder`, if it has one:
    `generate` of Transformers stops there."""
    file = folder / "generation_config.json"
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
        ends = add_chat_end(settings.get("eos_token_id"), tokenizer)
        if ends != settings.get("eos_token_id"):
            text = json.dumps({**settings, "eos_token_id": ends}, indent=2, sort_keys=True)
            file.write_text(text + "\n", encoding="utf-8")
