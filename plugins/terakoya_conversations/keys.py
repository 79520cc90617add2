"""Keys of conversations in other programs' formats: which are read, which mean nothing, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.corpus.documents import Reason
from terakoya.corpus.known_keys import NOTHING, TWO_FORMS, KnownKeys

LEARNED_FLAGS = ("weight", "train", "training", "loss")
"""Keys of a message that is learned where they are 1 or true, and only read where they are 0 or false: `weight` in
OpenAI's and Mistral's files, `train` and `training` in axolotl's, `loss` in XTuner's and SWIFT's."""
_WEIGHT: Reason = "an example that counts otherwise"
_NOT_TEXT: Mapping[str, Reason] = {
    "tools functions tool_calls function_call": "tools and their calls",
    "reasoning reasoning_content thinking": "reasoning beside the answer",
    "image images video videos audio audios": "images, video or sound",
    "chosen rejected kto_tag": "preferred and rejected answers",
}
_FLAGS = " ".join(LEARNED_FLAGS)
_ONE = {key: NOTHING - {"false"} | {"1", "1.0", "true"} for key in ("weight", "train")}
_MESSAGE: Mapping[str, Reason] = {**_NOT_TEXT, "train_detail loss_scale": "weight is not 0 or 1"}
_LINE: Mapping[str, Reason] = {**_MESSAGE, "weight train": _WEIGHT, "history input output response": TWO_FORMS}

KNOWN: Mapping[str, KnownKeys] = {
    "messages": KnownKeys(
        "messages system", {**_LINE, "conversations instruction": TWO_FORMS}, "prompt prompt_id", defaults=_ONE
    ),
    "conversations": KnownKeys("conversations system", {**_LINE, "messages instruction": TWO_FORMS}, defaults=_ONE),
    "instruction": KnownKeys(
        f"instruction input context output response system history {_FLAGS}", _NOT_TEXT, "text",
        one_of=("input context", "output response"),
    ),
    "message": KnownKeys(f"role content {_FLAGS}", _MESSAGE),
    "turn": KnownKeys(f"from value {_FLAGS}", _MESSAGE),
}  # fmt: skip
"""Kind of object -> its keys. `message` and `turn` are parts of `messages` and `conversations`."""
