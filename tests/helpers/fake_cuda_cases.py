"""The cases of the tests on fake_cuda's machine, and the table of what each may cost a GPU.

`python tests/helpers/fake_cuda_cases.py` takes every case and writes the table (about a minute of one core). A change
that makes a step dearer belongs in the table only with its reason in the commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fake_cuda
import torch
import toy

from terakoya_contract import toy as toy_model

TABLE = Path(__file__).parents[1] / "core" / "training" / "fake_cuda_steps.json"
WORKER = Path(__file__).with_name("fake_cuda_worker.py")

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
ENCODER = {**SIZES, "intermediate_size": 32}
NO_SCORES = {"attention_probs_dropout_prob": 0.0}
LLAMA = {**ENCODER, "num_key_value_heads": 1}
CAUSAL = {"type": "causal_lm"}
REPLACED = {"type": "replaced_token"}
DISENTANGLED = {"sharing": "disentangled", "generator": {"type": "deberta_v2", **ENCODER}}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}

ARCHITECTURES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "bert": ({**ENCODER, **NO_SCORES}, {"type": "masked_lm"}),
    "roberta": ({**ENCODER, **NO_SCORES, "max_position_embeddings": 34}, {"type": "masked_lm"}),
    "electra": ({**ENCODER, **NO_SCORES, "num_attention_heads": 4, "embedding_size": 16}, REPLACED),
    "deberta": (ENCODER, {"type": "masked_lm"}),
    "deberta_v2": (ENCODER, {"type": "masked_lm"}),
    "deberta_v3": ({**ENCODER, "type": "deberta_v2"}, {**REPLACED, **DISENTANGLED}),
    "modernbert": ({**ENCODER, "num_hidden_layers": 2}, {"type": "masked_lm"}),
    "t5": (T5, {"type": "span_corruption", "mean_noise_span_length": 5}),
    "gpt2": ({**SIZES, "attn_pdrop": 0.0}, CAUSAL),
    "gptj": ({**SIZES, "rotary_dim": 8}, CAUSAL),
    "llama": (LLAMA, CAUSAL),
    "qwen3": ({**LLAMA, "head_dim": 16}, CAUSAL),
    "modernbert_retromae": ({**ENCODER, "type": "modernbert"}, {"type": "retromae"}),
    "modernbert_replaced": (
        {**ENCODER, "type": "modernbert"},
        {**REPLACED, "generator": {"type": "modernbert", **ENCODER}},
    ),
    "mistral": ({**LLAMA, "sliding_window": 8}, CAUSAL),
    "olmo2": (LLAMA, CAUSAL),
    "eurobert": (LLAMA, {"type": "masked_lm"}),
    "modernbert_decoder": ({**ENCODER, "num_hidden_layers": 2}, CAUSAL),
    "gemma3_text": ({**LLAMA, "head_dim": 16, "num_hidden_layers": 2, "sliding_window_pattern": 2}, CAUSAL),
}
"""Architecture and objective by name."""
WITH_FLASH_ALONE = frozenset(
    {"modernbert_retromae", "modernbert_replaced", "mistral", "olmo2", "gemma3_text", "eurobert", "modernbert_decoder"}
)
"""What differs from another case in its layers, not in its attention."""
WITHOUT_FLASH = frozenset({"deberta", "deberta_v2", "deberta_v3", "t5", "gptj"})
"""What adds to its scores, or masks them itself, which the flash kernel does not compute."""
AT_NIGHT = frozenset({"modernbert_retromae", "modernbert_replaced", "mistral", "modernbert_decoder"})
"""What every change need not take: its parts are in other cases."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"type": name, "values": {}} for name in ("adafactor", "adamw", "lion", "muon", "stable_adamw")},
    "uncorrected_adamw": {"type": "adamw", "values": {"bias_correction": False}},
}
"""Optimizer and settings by name."""
PRECISIONS = ("bf16", "fp16")
TAKEN = [
    (name, backend)
    for name in ARCHITECTURES
    for backend in ("sdpa", "flash")
    if name not in (WITH_FLASH_ALONE if backend == "sdpa" else WITHOUT_FLASH)
]


def case(store: Path, name: str, *, attention: str, precision: str, optimizers: tuple[str, ...]) -> dict[str, Any]:
    """A case of the worker."""
    architecture, objective = ARCHITECTURES[name]
    parameters = toy.parameters(
        store, architecture={"type": name, **architecture}, objective=dict(objective), attention=attention,
        precision=precision, micro_batch_size=16, logging_steps=100,
    )  # fmt: skip
    return {"parameters": parameters, "optimizers": {each: OPTIMIZERS[each] for each in optimizers}}


def all_cases(store: Path) -> dict[str, Any]:
    """Each architecture, backend and precision, with each optimizer."""
    return {
        f"{name} {backend} {precision}": case(
            store, name, attention=backend, precision=precision, optimizers=tuple(OPTIMIZERS)
        )
        for name, backend in TAKEN
        for precision in PRECISIONS
    }


def some_cases(store: Path) -> dict[str, Any]:
    """In fp16 every twelfth architecture and backend but those for the night, in turns with one of the optimizers; in
    bf16 there are presets."""
    taken = [each for each in TAKEN if each[0] not in AT_NIGHT][1::12]
    return {
        f"{name} {backend} fp16": case(
            store, name, attention=backend, precision="fp16", optimizers=(list(OPTIMIZERS)[number % len(OPTIMIZERS)],)
        )
        for number, (name, backend) in enumerate(taken)
    }


def bert(store: Path, *, layers: int, width: int, length: int, **changes: Any) -> dict[str, Any]:
    """Parameters of a BERT, in micro-batches of 32 rows."""
    architecture = {
        "type": "bert", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": max(1, width // 64),
        "intermediate_size": 4 * width, "max_position_embeddings": length, **NO_SCORES,
    }  # fmt: skip
    return toy.parameters(
        store, data={"train": [str(store)], "validation": [], "sequence_length": length}, architecture=architecture,
        objective={"type": "masked_lm", "mlm_probability": 0.15}, attention="flash", precision="bf16",
        batch_size={"-1": 32}, micro_batch_size=32, logging_steps=100, **changes,
    )  # fmt: skip


def bert_base(store: Path, *, fused_kernels: str) -> dict[str, Any]:
    """A step of BERT-base, 32 rows of 512."""
    parameters = bert(store, layers=12, width=768, length=512, fused_kernels=fused_kernels)
    return {"parameters": parameters, "optimizers": {"adamw": OPTIMIZERS["adamw"]}, "vocabulary": 32768}


WIDE = {"hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 512}
WIDE_LLAMA = {**WIDE, "intermediate_size": 2048}
FAMILIES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "gpt2": ({**WIDE, "attn_pdrop": 0.0}, CAUSAL),
    "llama": (WIDE_LLAMA, CAUSAL),
    "mistral": ({**WIDE_LLAMA, "num_key_value_heads": 12}, CAUSAL),
    "qwen3": ({**WIDE_LLAMA, "head_dim": 64, "num_key_value_heads": 12}, CAUSAL),
    "olmo2": (WIDE_LLAMA, CAUSAL),
    "gemma3_text": ({**WIDE_LLAMA, "head_dim": 64, "num_key_value_heads": 12, "sliding_window_pattern": 1}, CAUSAL),
    "modernbert": ({**WIDE, "intermediate_size": 1152, "global_attn_every_n_layers": 1}, {"type": "masked_lm"}),
    "t5": (
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12},
        {"type": "span_corruption", "mean_noise_span_length": 76.0},
    ),
}
"""Architecture and objective by name: as wide as BERT-base and GPT-2."""


def wide(store: Path, name: str, *, layers: int, autocast: bool) -> dict[str, Any]:
    """A step of a family of `FAMILIES`, 16 rows of 512."""
    architecture, objective = FAMILIES[name]
    depth = "num_layers" if name == "t5" else "num_hidden_layers"
    parameters = toy.parameters(
        store, data={"train": [str(store)], "validation": [], "sequence_length": 512},
        architecture={"type": name, **architecture, depth: layers}, objective=dict(objective),
        attention="sdpa" if name in WITHOUT_FLASH else "flash", precision="bf16", autocast=autocast,
        batch_size={"-1": 16}, micro_batch_size=16, logging_steps=100,
    )  # fmt: skip
    return {"parameters": parameters, "optimizers": {"adamw": OPTIMIZERS["adamw"]}, "vocabulary": None}


PRESETS = Path(__file__).parents[2] / "parameters"
BLOCKS = 2
"""How many blocks of a preset a step in every run of the tests has; at night it has all."""


def preset(store: Path, name: str, *, blocks: int | None = None) -> dict[str, Any]:
    """A step of the preset `name` as shipped, on one GPU: with its rows and micro-steps and, where it takes them by
    itself, CUDA graphs, for a vocabulary of 32,768; or of so many `blocks`, as one of several GPUs computes it. Engines
    that divide weights are counted as what computes in each process: DDP, for DeepSpeed with autocast. Of phases it is
    the first. It has more steps than epochs of the small store, at whose end a step has fewer rows."""
    parameters = json.loads((PRESETS / f"{name}.json").read_text())
    architecture, objective = parameters["architecture"], parameters["objective"]
    for each in (architecture, objective.get("generator", {})) if blocks else ():
        each |= {key: blocks for key in ("num_hidden_layers", "num_layers") if key in each}
    rows = parameters["batch_size"]["-1"]
    micro = parameters.get("micro_batch_size") or rows
    store = store.parent / "conversations/store" if objective["type"] == "instruction" else store
    parameters["data"] = {**parameters["data"], "train": [str(store)], "validation": []}
    parameters |= {"batch_size": {"-1": min(rows, 2 * micro)}, "micro_batch_size": micro, "logging_steps": 100}
    parameters |= {"evaluation": None, "trackers": [], "precision": "bf16"}
    engine = parameters.pop("parallel", {}).get("engine", "ddp")
    parameters["autocast"] = engine == "deepspeed"
    optimizer = parameters["optimizer"]
    values = {key: value for key, value in optimizer.items() if key != "type"}
    for key in ("phases", "start_from", "epochs", "max_tokens"):
        parameters.pop(key, None)
    parameters["max_steps"] = 1000
    return {
        "parameters": parameters, "optimizers": {optimizer["type"]: {"type": optimizer["type"], "values": values}},
        "vocabulary": 32768, "micro_steps": -(-rows // micro), "compiler": blocks is None and engine == "ddp",
    }  # fmt: skip


def presets() -> dict[str, tuple[str, ...]]:
    """The presets by what their steps consist of: architecture, objective, optimizer and engine. Adapters
    of `tiny_lora` need a trained model."""
    found: dict[str, tuple[str, ...]] = {}
    for file in sorted(PRESETS.glob("*.json")):
        parts = json.loads(file.read_text())
        if "architecture" in parts and "lora" not in parts:
            kinds = (parts[key]["type"] for key in ("architecture", "objective", "optimizer"))
            engine = parts.get("parallel", {}).get("engine", "ddp")
            found[file.stem] = (*kinds, engine)
    return found


def some_presets(store: Path, names: Iterable[str] = ("bert_ja", "t5_base")) -> dict[str, Any]:
    """Presets with `BLOCKS` blocks: by default an encoder with Muon and an encoder-decoder."""
    return {f"{name}, {BLOCKS} blocks": preset(store, name, blocks=BLOCKS) for name in names}


def all_presets(store: Path) -> dict[str, Any]:
    """Every preset as it is."""
    return {name: preset(store, name) for name in presets()}


def every_case(store: Path) -> dict[str, Any]:
    """All that the table has. Of presets in bf16 with DDP that consist of the same, the first is in it with `BLOCKS`
    blocks, too."""
    first = {parts: name for name, parts in reversed(presets().items()) if parts[-2:] == ("bf16", "ddp")}
    return {**all_cases(store), **some_presets(store, sorted(first.values())), **all_presets(store)}


def make_stores(folder: Path) -> Path:
    """Returns a store in `folder`, beside which is one of conversations."""
    store = toy.make_store(folder, documents=50, seed=1)
    (store.parent / "conversations").mkdir()
    toy_model.make_store(store.parent / "conversations", conversations=True)
    return store


def take(
    cases: Mapping[str, Any], guard: Path, out: Path, *, roads: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the worker, a process of its own, saw of each case, and what it measures besides; with `roads` it goes those
    of `fake_cuda_roads`, too."""
    out.mkdir(exist_ok=True)
    arguments = [str(WORKER), str(out), *(["roads"] if roads else [])]
    seen: dict[str, Any] = json.loads(run(arguments, json.dumps(cases), guard))
    names = ("ways", "bytes a logit", "bytes an element", "refusals", *(["roads"] if roads else []))
    return seen, {name: seen.pop(name) for name in names}


def run(arguments: list[str], given: str, guard: Path) -> str:
    """The last line that a program, which reads what is `given`, prints in a process of its own, which torch takes for
    one with CUDA."""
    environment = {**os.environ, "LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def costs(seen: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Kernels and bytes of each step without its update, and of each update: one entry for each architecture,
    precision and optimizer, since an update does not depend on the attention. Of a preset those of a whole step."""
    found: dict[str, dict[str, int]] = {}
    for name, each in seen.items():
        found[name] = {"kernels": each["kernels"], "bytes": each["bytes"]}
        if name.split(",")[0] in presets():
            for update in each["updates"].values():
                found[name] = {key: value + update[key] for key, value in found[name].items()}
            continue
        architecture, _, precision = name.split()
        for optimizer, update in each["updates"].items():
            found[f"{architecture} {optimizer} {precision}"] = {
                "kernels": update["kernels"], "bytes": update["bytes"]
            }  # fmt: skip
    return found


def torch_version() -> str:
    """torch's major and minor version, on which the number of kernels depends."""
    return ".".join(torch.__version__.split(".")[:2])


def write() -> None:
    """Writes the table."""
    with tempfile.TemporaryDirectory() as folder:
        store = make_stores(Path(folder) / "store")
        seen, _ = take(every_case(store), fake_cuda.compile_guard(Path(folder)), Path(folder) / "run")
    lines = [f'"{name}": {json.dumps(cost)}' for name, cost in sorted(costs(seen).items())]
    steps = ",\n  ".join(lines)
    TABLE.write_text(f'{{"torch": "{torch_version()}", "steps": {{\n  {steps}\n}}}}\n')


if __name__ == "__main__":
    write()
