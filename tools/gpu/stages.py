"""What is measured: the stages of each part, in the order of what they are worth, since a part may be cut off.

B, C and D are the three calls of an hour on a GPU, which keeps Transformers' `Trainer` for its end; A asks whether runs
are right.
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

BLOCKS, GRAPHS = {"cuda_graphs": False}, {"cuda_graphs": True}
EXACT, ANY = {"deterministic": True}, {"deterministic": False}
SDPA = {"attention": "sdpa"}


def changed(preset: str, *settings: Mapping[str, Any], **sizes: Any) -> Case:
    """Returns a preset with further `settings`, and with `sizes`, which are fields of `Case`."""
    return Case(preset, further={key: value for each in settings for key, value in each.items()}, **sizes)


def ours(seconds: float, preset: str, *settings: Mapping[str, Any], **sizes: Any) -> Stage:
    """Returns the stage of our rate of a `changed` preset."""
    case = changed(preset, *settings, **sizes)
    return Stage(f"{preset}, {case.label}", seconds, partial(rate, case=case))


def kernels(seconds: float, preset: str, *settings: Mapping[str, Any]) -> Stage:
    """Returns the stage of a profile of a `changed` preset, of one micro-step a step."""
    case = changed(preset, *settings, micro_steps=1)
    return Stage(f"profile {preset}, {case.label}", seconds, partial(profile, case=case))


def trainer(seconds: float, preset: str, **further: Any) -> Stage:
    """Returns the stage of a preset beside `Trainer`; `further` are arguments of `beside_trainer`."""
    case = Case(preset, micro_steps=1)
    return Stage(f"{preset} beside Trainer", seconds, partial(beside_trainer, case=case, **further))


FACTS = Stage("facts", 10, facts)
RESUMES = (Stage("graphs", 90, graphs), Stage("command", 75, command))
LLAMA_8B = Stage("llama_8b", 80, partial(llama_8b, case=Case("llama_8b", micro_steps=8)))

PARTS: Mapping[str, Sequence[Stage]] = {
    "A": (
        *RESUMES, Stage("parity", 90, parity), Stage("padded", 25, padded), Stage("memory", 40, memory),
        Stage("precisions", 55, precisions), Stage("fused", 50, fused), Stage("waits", 50, waits),
    ),
    "B": (
        FACTS,
        ours(25, "bert_large", BLOCKS, EXACT, micro_steps=1), ours(25, "bert_large", BLOCKS, ANY, micro_steps=1),
        ours(15, "bert_base", BLOCKS, EXACT, micro_steps=1), ours(15, "bert_base", BLOCKS, ANY, micro_steps=1),
        ours(40, "bert_base", GRAPHS, EXACT, micro_steps=1), ours(40, "bert_base", GRAPHS, ANY, micro_steps=1),
        Stage("attention", 30, attention), Stage("embeddings", 6, embeddings),
        ours(40, "bert_base", GRAPHS, ANY, SDPA, micro_steps=1),
        ours(40, "bert_base", GRAPHS, EXACT, SDPA, micro_steps=1),
        ours(25, "electra_small", BLOCKS, EXACT), ours(50, "electra_small", GRAPHS, ANY),
        ours(45, "bert_base"), ours(70, "bert_large", GRAPHS, ANY, micro_steps=1),
        kernels(22, "bert_large", BLOCKS, EXACT), kernels(22, "bert_large", BLOCKS, ANY),
        kernels(22, "bert_base", BLOCKS, EXACT), kernels(22, "bert_base", BLOCKS, ANY),
    ),
    "C": (
        FACTS, ours(70, "bert_large"), ours(40, "electra_small"), ours(50, "gpt2_125m"), ours(60, "electra_base"),
        ours(60, "modernbert_base", micro_steps=8), ours(60, "llama_1b", micro_steps=8), LLAMA_8B,
        ours(25, "gpt2_125m", BLOCKS, EXACT, micro_steps=1), ours(40, "gpt2_125m", GRAPHS, ANY, micro_steps=1),
        ours(25, "gpt2_125m", BLOCKS, ANY, micro_steps=1), ours(40, "gpt2_125m", GRAPHS, EXACT, micro_steps=1),
    ),
    "D": (
        FACTS, *RESUMES,
        *(ours(22, "bert_ja", how, bits) for how in (GRAPHS, BLOCKS) for bits in (EXACT, ANY)),
        *(ours(35, preset, GRAPHS, ANY, rows=rows, micro_steps=1)
          for preset, rows in {"bert_base": 64, "bert_large": 48, "electra_small": 512, "gpt2_125m": 64}.items()),
        ours(40, "gpt2_125m", GRAPHS, ANY, vocabulary=50_257, micro_steps=1),
        *(ours(30, preset, BLOCKS, EXACT, micro_steps=1) for preset in ("electra_base", "modernbert_base")),
        *(kernels(25, preset, BLOCKS, EXACT) for preset in ("electra_small", "gpt2_125m")),
        trainer(90, "bert_base", forms=("rows", "documents")), trainer(90, "electra_small"), trainer(90, "gpt2_125m"),
        trainer(120, "bert_large"), trainer(120, "llama_1b"),
    ),
}  # fmt: skip
