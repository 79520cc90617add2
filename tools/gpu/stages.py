"""What is measured: the stages of each part, in the order of what they are worth, since a part may be cut off.

B and C are the two calls of a quarter of an hour on a GPU: ours alone as shipped, then what settings change, then
beside Transformers' `Trainer`. D is all else that can be measured; A asks whether runs are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from correctness import parity, precisions, waits
from fused_kernels import fused
from kernel_times import attention, embeddings
from machine import command, facts, graphs, memory
from padded import padded
from rates import beside_trainer, llama_8b, profile, rate
from settings import Case, Stage

BLOCKS, ANY, SDPA = {"cuda_graphs": False}, {"deterministic": False}, {"attention": "sdpa"}


def ours(seconds: float, preset: str, *settings: Mapping[str, Any], **sizes: Any) -> Stage:
    """Returns the stage of our rate of a preset with further `settings` and with `sizes`, fields of `Case`."""
    case = Case(preset, further={key: value for each in settings for key, value in each.items()}, **sizes)
    return Stage(f"{preset}, {case.label}", seconds, partial(rate, case=case))


def kernels(seconds: float, preset: str) -> Stage:
    """Returns the stage of a profile of a preset in blocks, of one micro-step a step."""
    return Stage(f"profile {preset}", seconds, partial(profile, case=Case(preset, micro_steps=1, further=BLOCKS)))


def trainer(seconds: float, preset: str, **further: Any) -> Stage:
    """Returns the stage of a preset beside `Trainer`; `further` are arguments of `beside_trainer`."""
    case = Case(preset, micro_steps=1)
    return Stage(f"{preset} beside Trainer", seconds, partial(beside_trainer, case=case, **further))


FACTS = Stage("facts", 10, facts)

PARTS: Mapping[str, Sequence[Stage]] = {
    "A": (
        Stage("graphs", 90, graphs), Stage("command", 75, command), Stage("parity", 90, parity),
        Stage("padded", 25, padded), Stage("memory", 40, memory), Stage("precisions", 55, precisions),
        Stage("fused", 50, fused), Stage("waits", 50, waits),
    ),
    "B": (
        FACTS,
        ours(45, "bert_base"), ours(70, "bert_large"), ours(40, "electra_small"), ours(50, "gpt2_125m"),
        ours(60, "electra_base"), ours(60, "modernbert_base", micro_steps=8),
        ours(40, "bert_base", ANY), ours(25, "bert_base", BLOCKS), Stage("attention", 30, attention),
    ),
    "C": (ours(60, "llama_1b", micro_steps=8), ours(40, "gpt2_125m", ANY),
          trainer(90, "bert_base", forms=("rows", "documents"))),
    "D": (
        FACTS, Stage("llama_8b", 80, partial(llama_8b, case=Case("llama_8b", micro_steps=8))),
        ours(70, "bert_large", ANY), ours(25, "bert_large", BLOCKS), ours(25, "electra_small", BLOCKS),
        ours(25, "gpt2_125m", BLOCKS), ours(25, "bert_ja"), ours(25, "bert_ja", ANY),
        ours(40, "bert_base", SDPA), ours(40, "bert_base", ANY, SDPA), Stage("embeddings", 6, embeddings),
        *(ours(35, preset, ANY, rows=rows, micro_steps=1)
          for preset, rows in {"bert_base": 64, "bert_large": 48, "electra_small": 512, "gpt2_125m": 64}.items()),
        ours(40, "gpt2_125m", ANY, vocabulary=50_257),
        *(kernels(25, preset) for preset in ("bert_base", "bert_large", "electra_small", "gpt2_125m")),
        trainer(90, "electra_small"), trainer(90, "gpt2_125m"), trainer(120, "bert_large"), trainer(120, "llama_1b"),
    ),
}  # fmt: skip
