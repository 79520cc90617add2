"""Scripts that start a GPT of Megatron-DeepSpeed and a Llama of Megatron-LM, whose layouts train at toy size on eight
processes what one process trains, and of which `estimate --gpus` says which card holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya_clusters.layouts.find_layouts import find_layouts
from terakoya_megatron.importer import MegatronImporter

pytest.importorskip("tree_sitter_bash", reason='needs `pip install "terakoya[megatron]"`')

GPT = """
mp_size=2
pp_size=2
zero_stage=1
num_gpus=$((8 * ${NHOSTS}))
dp_size=$(( ${num_gpus} / ${pp_size} / ${mp_size} ))
options=" --num-layers ${num_layers:-12} --hidden-size ${hidden_size:-768} --num-attention-heads ${heads:-12} \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 256 \\
    --lr 6.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --train-tokens 300000000000 --lr-decay-tokens 300000000000 \\
    --lr-warmup-tokens 3000000000 --data-path arxiv_text_document --split 949,50,1 --fp16 --hysteresis 2 \\
    --use-flash-attn-v2 --tensor-model-parallel-size ${mp_size} --eval-interval 100 --eval-iters 10"
deepspeed_options=" --deepspeed --zero-stage ${zero_stage} --pipeline-model-parallel-size ${pp_size}"
deepspeed --master_port 29500 --hostfile hostfile ${dir}/pretrain_gpt.py ${options} ${deepspeed_options} 2>&1 | tee log
"""
LLAMA = """
TENSOR_PARALLEL_SIZE=${mp_size:-2}
PIPELINE_PARALLEL_SIZE=${pp_size:-2}
MODEL_ARGS=(--num-layers ${num_layers:-32} --hidden-size ${hidden_size:-4096} --ffn-hidden-size ${ffn:-14336}
    --num-attention-heads ${heads:-32} --group-query-attention --num-query-groups ${groups:-8} --seq-length 2048
    --max-position-embeddings 2048 --position-embedding-type rope --rope-theta 500000.0 --no-position-embedding
    --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --attention-dropout 0.0
    --hidden-dropout 0.0 --untie-embeddings-and-output-weights --init-method-std 0.008)
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py "${MODEL_ARGS[@]}" \\
    --tensor-model-parallel-size ${TENSOR_PARALLEL_SIZE} --pipeline-model-parallel-size ${PIPELINE_PARALLEL_SIZE} \\
    --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 \\
    --global-batch-size 1536 --train-iters 25000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \\
    --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-flash-attn --recompute-activations \\
    --recompute-granularity selective --transformer-impl transformer_engine --fp8-format hybrid \\
    --fp8-amax-compute-algo max --fp8-amax-history-len 1024 --data-path 1.0 corpus --split 998,1,1 --use-z-loss
"""
TOY = {"num_layers": "4", "hidden_size": "32", "heads": "4", "ffn": "64", "groups": "4"}
SCRIPTS = {"gpt": GPT, "llama": LLAMA}
SHARDED = {"engine": "fsdp"}
ALL = ["h100", "h200", "a100-80gb", "a100-40gb"]
LAYOUTS: dict[str, tuple[str, tuple[int, int, int], dict[str, Any], int, list[str]]] = {
    "ZeRO 1": ("gpt", (1, 1, 1), {"engine": "deepspeed", "zero_stage": 1}, 16, ALL),
    "ZeRO 1, pp 2": ("gpt", (1, 1, 2), {**SHARDED, "pp_size": 2}, 16, ALL),
    "ZeRO 1, tp 2": ("gpt", (1, 2, 1), {**SHARDED, "tp_size": 2}, 16, ALL),
    "ZeRO 1, tp 2, pp 2": ("gpt", (1, 2, 2), {**SHARDED, "tp_size": 2, "pp_size": 2}, 16, ALL),
    "tp 2, pp 4": ("gpt", (1, 2, 4), {**SHARDED, "tp_size": 2, "pp_size": 4}, 16, ALL),
    "8B in fp8": (
        "llama", (1, 2, 2), {**SHARDED, "tp_size": 2, "pp_size": 2, "sequence_parallel": True}, 32, ["h100", "h200"],
    ),
}  # fmt: skip
"""Script, (ZeRO's stage, tp, pp), what becomes of it, the number of GPUs, and which cards hold it."""


def convert(kind: str, sizes: tuple[int, int, int], folder: Path, **defined: str) -> dict[str, Any]:
    """The parameter JSON of a script with the sizes of a layout, and with the values that are `defined`."""
    script = folder / f"{kind}.sh"
    script.write_text(SCRIPTS[kind])
    layout = dict(zip(("zero_stage", "mp_size", "pp_size"), map(str, sizes), strict=True))
    importer = MegatronImporter(define=tuple(f"{name}={value}" for name, value in {**layout, **defined}.items()))
    found = importer.parameters(script)
    assert not any("unknown option" in why for why in found.unsupported.values()), found.unsupported
    return dict(found.parameters)


def small(parameters: Mapping[str, Any], store: Path) -> dict[str, Any]:
    """The run at toy size, in float32 without dropout and with two steps."""
    dry = {name: 0.0 for name in parameters["architecture"] if name.endswith(("pdrop", "dropout"))}
    kept = {name: parameters[name] for name in ("objective", "optimizer", "max_grad_norm", "seed", "parallel")}
    return {
        **kept, "data": {"train": [str(store)], "sequence_length": 32},
        "architecture": {**parameters["architecture"], **dry, "max_position_embeddings": 32},
        "objective": {**parameters["objective"], "append_eos": False, "samples": None},
        "activation_checkpointing": parameters.get("activation_checkpointing"),
        "schedule": {"type": "constant"}, "max_steps": 2, "logging_steps": 1, "micro_batch_size": 1,
        "checkpoint": {"save_steps": 2},
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_scripts_train_on_eight_processes(name: str, store: Path, tmp_path: Path) -> None:
    kind, sizes, parallel, _, _ = LAYOUTS[name]
    settings = small(convert(kind, sizes, tmp_path, **TOY), store)
    assert settings["parallel"] == parallel
    batch = {"0": 8, "1": 8}
    toy.train({**settings, "parallel": {"engine": "ddp"}, "batch_size": {"-1": 16}}, tmp_path / "one")
    toy.train({**settings, "batch_size": batch}, tmp_path / "eight", nodes=(4, 4))
    expected, found = toy.losses(tmp_path / "one"), toy.losses(tmp_path / "eight")
    assert found.keys() == expected.keys() == {1, 2}
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4), (step, json.dumps(parallel))


@pytest.mark.nightly
@pytest.mark.usefixtures("remembered_steps")
def test_the_estimate_says_which_card_holds_each(tmp_path: Path) -> None:
    for name, (kind, sizes, parallel, gpus, held_by) in LAYOUTS.items():
        parameters = convert(kind, sizes, tmp_path)
        assert parameters["parallel"] == parallel and parameters["precision"] == ("fp8" if kind == "llama" else "fp16")
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(parameters))
        found = find_layouts(file, gpus, gpu="h100", vocab_size=50_000 if kind == "gpt" else 65_024)
        assert (name, found.held_by) == (name, held_by)
        assert found.fastest_supported is not None
