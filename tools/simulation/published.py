"""Published speeds of training on many GPUs, and the predictions of `terakoya_planning` for the same runs.

`published.csv` holds one run per line, as its publishers describe it: tokens per second and GPU, and GiB of memory
where published. Runs in fp8 are left out, because the formulas do not cover them. Sources:

    llm-foundry         github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: all runs in bfloat16
    torchtitan 2024-12  github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3
    torchtitan 2024-06  the same repository, docs/performance.md of mid-2024
    Korthikanti 2022    arXiv:2205.05198, tables 3 and 5
    Smith 2022          arXiv:2201.11990, section 2.4 (MT-NLG 530B)
    nanoGPT             its README: 600,000 steps of 491,520 tokens in "about 4 days"
    llm.c               github.com/karpathy/llm.c, discussion 481: 140 ms for 524,288 tokens on 8 GPUs
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from decoder import decoder

from terakoya_clusters.layouts.cluster import Cluster, Gpu, Layout, Program, find_gpu
from terakoya_clusters.layouts.rank_memory import rank_memory
from terakoya_clusters.layouts.step_time import StepTime, step_time
from terakoya_clusters.layouts.transformer import Transformer
from terakoya_planning.devices import GIB

FILE = Path(__file__).with_name("published.csv")
FITTED_MODELS = ("mpt-1b", "mpt-7b")
"""The models of llm-foundry to whose runs the constants were fitted. All other runs are held out."""


def mpt(layers: int, hidden_size: int, heads: int) -> partial[Transformer]:
    """Returns a model of llm-foundry: a GPT with 50,368 tokens."""
    return partial(decoder, layers=layers, hidden_size=hidden_size, heads=heads, vocabulary_size=50368)


def gpt(layers: int, hidden_size: int, heads: int) -> partial[Transformer]:
    """Returns a model of Megatron-LM's papers: a GPT with 51,200 tokens whose attention keeps its scores."""
    return partial(
        decoder, layers=layers, hidden_size=hidden_size, heads=heads, vocabulary_size=51200, flash=False
    )  # fmt: skip


def llama(
    layers: int, hidden_size: int, feed_forward: int, heads: int, key_value_heads: int, vocabulary_size: int
) -> partial[Transformer]:
    """Returns a Llama."""
    return partial(
        decoder, layers=layers, hidden_size=hidden_size, feed_forward=feed_forward, heads=heads,
        key_value_heads=key_value_heads, vocabulary_size=vocabulary_size, gated=True, tied=False, positions=False,
    )  # fmt: skip


MODELS: Mapping[str, partial[Transformer]] = {
    "mpt-125m": mpt(12, 768, 12), "mpt-350m": mpt(24, 1024, 16), "mpt-760m": mpt(24, 1536, 12),
    "mpt-1b": mpt(24, 2048, 16), "mpt-3b": mpt(32, 2560, 20), "mpt-7b": mpt(32, 4096, 32),
    "mpt-13b": mpt(40, 5120, 40), "mpt-30b": mpt(48, 7168, 56), "mpt-70b": mpt(80, 8192, 64),
    "llama3-8b": llama(32, 4096, 14336, 32, 8, 128256), "llama3-70b": llama(80, 8192, 28672, 64, 8, 128256),
    "llama2-13b": llama(40, 5120, 13824, 40, 40, 32000), "llama2-70b": llama(80, 8192, 28672, 64, 8, 32000),
    "gpt-22b": gpt(48, 6144, 64), "gpt-175b": gpt(96, 12288, 96), "gpt-530b": gpt(105, 20480, 128),
    "gpt-1t": gpt(128, 25600, 160),
    "gpt2-124m": partial(decoder, layers=12, hidden_size=768, heads=12, vocabulary_size=50304),
}  # fmt: skip

FSDP = Program(gathered=2)
TITAN = replace(FSDP, recomputed_products=0.5, recomputed_traffic=1.0)  # keeps every second product, and attention
MEGATRON = Program(
    weights=2, gradients=4, optimizer=12, gathered=2, reduced=4, fused=True, flash=False,
    recomputed_attention=1.0, recomputed_traffic=0.0,
)  # fmt: skip
PROGRAMS: Mapping[str, Program] = {
    "fsdp": FSDP,
    "fsdp-bf16": replace(FSDP, reduced=2),
    "torchtitan": TITAN,
    "torchtitan-compiled": replace(TITAN, fused=True),
    "torchtitan-alternate": replace(FSDP, recomputed_products=0.5, recomputed_attention=0.5, recomputed_traffic=0.5),
    "megatron": MEGATRON,
    "autocast-compiled": Program(fused=True),
    "llm.c": Program(weights=2, gradients=2, optimizer=12, gathered=2, reduced=2, fused=True),
}
"""What each program holds and sends: FSDP gathers bfloat16 and reduces float32; Megatron-LM has float32 gradients with
16-bit weights, and its selective recomputation covers attention only."""


@dataclass(frozen=True)
class Published:
    """One published run.

    Attributes:
        rate: tokens per second and GPU.
        gib: memory of a GPU; None if not published.
    """

    source: str
    name: str
    model: Transformer
    layout: Layout
    cluster: Cluster
    program: Program
    rate: float
    gib: float | None

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to this run."""
        return self.source == "llm-foundry" and self.name in FITTED_MODELS

    def time(self) -> StepTime:
        """The predicted time of a step."""
        return step_time(self.model, self.layout, self.cluster, self.program)

    def error(self) -> float:
        """Predicted over published rate, minus 1."""
        return self.time().tokens_per_second / self.cluster.gpus / self.rate - 1

    def memory_error(self) -> float | None:
        """Predicted over published memory, minus 1."""
        if self.gib is None:
            return None
        return sum(rank_memory(self.model, self.layout, self.program).values()) / (self.gib * GIB) - 1


def device(name: str) -> Gpu:
    """Returns the GPU of a published run; torchtitan's H100s have more and slower memory, and less power."""
    if name == "h100-500w":
        return replace(find_gpu("h100"), name=name, memory=96 * GIB, bandwidth=2.4e12 * 0.9)
    return find_gpu(name)


def published(file: Path = FILE) -> list[Published]:
    """Returns all runs of `file`."""
    with file.open(newline="") as lines:
        return [_read(line) for line in csv.DictReader(lines)]


def _read(line: Mapping[str, str]) -> Published:
    number = {key: int(value) for key, value in line.items() if value.isdigit()}
    tensor, pipeline, gpus = number["tensor"], number["pipeline"], number["gpus"]
    recomputation: Any = line["recomputation"] or None
    layout = Layout(
        data=gpus // (tensor * pipeline), tensor=tensor, pipeline=pipeline, virtual=number["virtual"],
        zero_stage=number["zero_stage"], norms_shared=bool(number["norms_shared"]),
        micro_batch_size=number["micro_batch_size"], micro_steps=number["micro_steps"], recomputation=recomputation,
    )  # fmt: skip
    model = MODELS[line["model"]](sequence_length=number["sequence_length"])
    gib = float(line["memory_gib"]) if line["memory_gib"] else None
    return Published(
        line["source"], line["model"], model, layout, Cluster(device(line["gpu"]), gpus), PROGRAMS[line["program"]],
        float(line["tokens_per_second"]), gib,
    )  # fmt: skip
