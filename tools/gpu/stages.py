"""What is measured: the stages of each part, those that matter most first, since a part may be cut off.

The seconds of a part's stages add up to 8.5 minutes. A stage that needs fewer leaves the rest to those after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from correctness import parity, precisions, waits
from fused_kernels import fused
from kernel_times import boundaries
from machine import command, facts, graphs, memory
from padded import padded
from rates import SHIPPED, beside_trainer, documents, llama_8b, profiles, variants, whole_llama_8b
from settings import Case, Stage

# Both sides of these are in the memory of the card at once, which limits their rows to what 80 GB hold.
BERT_BASE, BERT_LARGE = Case("bert_base", 32), Case("bert_large", 16)
ELECTRA_SMALL, ELECTRA_BASE = Case("electra_small", 128), Case("electra_base", 32)
MODERNBERT_BASE = Case("modernbert_base", 16)
GPT2, LLAMA_1B = Case("gpt2_125m", 32), Case("llama_1b", 2, micro_steps=4, window=5)
LLAMA_8B = Case("llama_8b", 1, micro_steps=4, length=4096, window=5)
WHOLE = Case("llama_8b", 1, micro_steps=4, length=4096, window=2, further={"activation_checkpointing": "full"})

FASTEST, GRAPHS = {"deterministic": False}, {"cuda_graphs": True}
LAUNCHES = tuple(
    (label, Case("electra_small", rows, further={"compile": "whole", **further}))
    for rows in (128, 512, 32)
    for label, further in (("CUDA graphs", GRAPHS), ("compiled whole", {}))
)
"""The fewer rows, the more the host holds the GPU up."""
ALGORITHMS = (
    ("CUDA graphs, not deterministic", Case("bert_base", 32, further={**GRAPHS, **FASTEST})),
    ("CUDA graphs", Case("bert_base", 32, further=GRAPHS)),
    ("not deterministic", Case("bert_base", 32, further=FASTEST)),
    (SHIPPED, Case("bert_base", 32)),
)
"""What deterministic algorithms cost, and what CUDA graphs save."""
JAPANESE = (
    ("CUDA graphs, not deterministic", Case("bert_ja", 64, further={**GRAPHS, **FASTEST})),
    (SHIPPED, Case("bert_ja", 64)),
    ("CUDA graphs", Case("bert_ja", 64, further=GRAPHS)),
    ("not deterministic", Case("bert_ja", 64, further=FASTEST)),
)
"""The preset for Japanese encoders, with Muon."""
ENCODERS = (
    (SHIPPED, Case("bert_base", 96)),
    ("not compiled", Case("bert_base", 32, further={"compile": "off"})),
    (SHIPPED, Case("bert_large", 48)),
    ("attention dropout 0.1, as in the paper",
     Case("bert_base", 32, architecture={"attention_probs_dropout_prob": 0.1})),
    ("sdpa", Case("bert_base", 32, further={"attention": "sdpa"})),
    (SHIPPED, Case("electra_base", 64)),
    (SHIPPED, Case("bert_large", 32)),
    (SHIPPED, Case("bert_base", 64)),
)  # fmt: skip
DECODERS = (
    ("vocabulary 50,257", Case("gpt2_125m", 32, vocabulary=50_257)),
    ("stream", Case("gpt2_125m", 32, objective={"layout": "stream"})),
    (SHIPPED, Case("gpt2_125m", 64)),
    ("not compiled", Case("gpt2_125m", 32, further={"compile": "off"})),
    ("sdpa", Case("gpt2_125m", 32, further={"attention": "sdpa"})),
    (SHIPPED, Case("gpt2_125m", 16)),
    ("fp8", Case("llama_1b", 2, micro_steps=4, window=5, further={"precision": "fp8"})),
)


def both(case: Case) -> Iterator[tuple[str, Case]]:
    """Yields the case as it is shipped, and without deterministic algorithms."""
    yield SHIPPED, case
    yield "not deterministic", replace(case, further={**case.further, **FASTEST})


STAGES = (
    Stage("A", "facts", "which card, driver and packages; how fast it copies and multiplies", 35, facts),
    Stage("A", "fused", "do the fused kernels compute what torch computes, and is a block faster with them", 50, fused),
    Stage("A", "command", "does `terakoya train` run, stop at SIGTERM and resume to the bit", 75, command),
    Stage("A", "waits", "does a step wait for the device, for each optimizer", 50, waits),
    Stage("A", "parity", "loss and gradient of six architectures beside float32 on the CPU, compiled too; "
          "the same bits twice?", 90, parity),
    Stage("A", "padded", "padded batches in Transformers' own models, as `finetune` has them: is every gradient finite "
          "and right", 25, padded),
    Stage("A", "memory", "what a run holds beside what `terakoya estimate` says; the advice where memory runs out", 40,
          memory),
    Stage("A", "graphs", "with CUDA graphs: does a run resume to the bit, and compute what it computes without them",
          60, graphs),
    Stage("A", "precisions", "losses of 50 steps in TF32, bf16, fp16 and fp8 beside float32, and their rates", 55,
          precisions),
    Stage("A", "boundaries", "what room for documents that are not there costs flash attention; masked attention "
          "beside it", 30, boundaries),
    Stage("B", "bert_base", "tokens/s beside `Trainer`", 70, partial(beside_trainer, case=BERT_BASE)),
    Stage("B", "bert_large", "the same", 85, partial(beside_trainer, case=BERT_LARGE)),
    Stage("B", "profiles", "the slowest kernels of a step, and how many there are", 40,
          partial(profiles, cases=(*both(BERT_BASE), *both(BERT_LARGE), *both(ELECTRA_SMALL)))),
    Stage("B", "electra_small", "the same; the peer is ELECTRA as most write it, in `Trainer`", 55,
          partial(beside_trainer, case=ELECTRA_SMALL)),
    Stage("B", "electra_base", "the same", 50, partial(beside_trainer, case=ELECTRA_BASE)),
    Stage("B", "algorithms", "BERT-base with deterministic algorithms and any, with CUDA graphs and without", 65,
          partial(variants, cases=ALGORITHMS)),
    Stage("B", "bert_ja", "the same of `bert_ja`, which has Muon", 30, partial(variants, cases=JAPANESE)),
    Stage("B", "launches", "ELECTRA-small compiled whole, with CUDA graphs and without, of few and many rows", 30,
          partial(variants, cases=LAUNCHES)),
    Stage("B", "modernbert_base", "tokens/s beside `Trainer`", 55, partial(beside_trainer, case=MODERNBERT_BASE)),
    Stage("B", "variants", "BERT and ELECTRA of more rows, not compiled, with attention dropout, without flash", 15,
          partial(variants, cases=ENCODERS)),
    Stage("B", "documents", "BERT-base beside `Trainer` on the same documents padded, and not compiled", 15,
          partial(documents, case=BERT_BASE)),
    Stage("C", "gpt2_125m", "tokens/s beside `Trainer`", 75, partial(beside_trainer, case=GPT2)),
    Stage("C", "llama_8b", "the same for 2 and 6 layers of Llama-8B, and what follows for all 32", 150,
          partial(llama_8b, case=LLAMA_8B)),
    Stage("C", "llama_8b_whole", "all layers, where the card's memory holds them", 110,
          partial(whole_llama_8b, case=WHOLE)),
    Stage("C", "llama_1b", "tokens/s beside `Trainer`", 95, partial(beside_trainer, case=LLAMA_1B)),
    Stage("C", "variants", "GPT-2 with 50,257 pieces, in stream rows, of other rows, not compiled; Llama in fp8", 60,
          partial(variants, cases=DECODERS)),
    Stage("C", "profiles", "the slowest kernels of a step, and how many there are", 20,
          partial(profiles, cases=(*both(GPT2), *both(LLAMA_1B)))),
)  # fmt: skip


def warms(stage: Stage) -> bool:
    """Returns whether the stage can be asked to compile only (`Settings.warm`)."""
    return getattr(stage.run, "func", None) in (beside_trainer, documents, variants, llama_8b)


def of_part(part: str) -> Mapping[str, Stage]:
    """Returns the stages of `part` by name, in their order."""
    return {each.name: each for each in STAGES if each.part == part}
