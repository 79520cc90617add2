"""What each option of Megatron-LM's and Megatron-DeepSpeed's pretrain_gpt.py becomes: one table, and a page made of it.

`MEGATRON_FLAGS.md` beside this file is `page()`; a test holds it and the conversion to the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Fate = Literal["placed", "dropped", "unplaced"]


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
        fate: it becomes a key, nothing is lost without it, or there is no place for it.
        text: the key or keys that it becomes; or why it is dropped, or what has no place.
        sample: a value to try it with; "" for a switch. Of those that are placed.
    """

    fate: Fate
    text: str
    sample: str = ""


def _placed(text: str, sample: str = "") -> Flag:
    return Flag("placed", text, sample)


HOW = "how Megatron computes, not what"
LOGGED = "always logged"
RESUMED = "a run goes on by itself from its newest checkpoint, with its parameters"
FOLDER = "the run's folder is `--out` of `terakoya train`"
TOKENS = "a store knows its tokenizer"
AGAIN = "every block is computed again"
NO_RING = "no ring attention; `--set parallel.sp_size=N` shares the positions of rows in another way"
EXPERTS = "a mixture of experts"
EIGHT = "how 8-bit products are scaled: accelerate's recipe says it"

GROUPS: Mapping[str, Mapping[str, Flag]] = {
    "Model": {
        "num-layers": _placed("architecture.num_hidden_layers", "3"),
        "hidden-size": _placed("architecture.hidden_size", "96"),
        "ffn-hidden-size": _placed("architecture.intermediate_size", "320"),
        "num-attention-heads": _placed("architecture.num_attention_heads", "8"),
        "num-query-groups": _placed("architecture.num_key_value_heads", "2"),
        "num-key-value-heads": _placed("architecture.num_key_value_heads", "2"),
        "group-query-attention": _placed("architecture.num_key_value_heads"),
        "max-position-embeddings": _placed("architecture.max_position_embeddings", "128"),
        "position-embedding-type": _placed("architecture.type", "rope"),
        "use-rotary-position-embeddings": _placed("architecture.type"),
        "swiglu": _placed("architecture.type"),
        "normalization": _placed("architecture.type", "RMSNorm"),
        "disable-bias-linear": _placed("architecture.type"),
        "rotary-base": _placed("architecture.rope_theta", "500000"),
        "rope-theta": _placed("architecture.rope_theta", "500000"),
        "norm-epsilon": _placed("architecture.rms_norm_eps", "1e-4"),
        "layernorm-epsilon": _placed("architecture.rms_norm_eps", "1e-4"),
        "untie-embeddings-and-output-weights": _placed("architecture.tie_word_embeddings"),
        "init-method-std": _placed("architecture.initializer_range", "0.008"),
        "attention-dropout": _placed("architecture.attention_dropout", "0.2"),
        "hidden-dropout": _placed("architecture.resid_pdrop", "0.2"),
        "openai-gelu": _placed("architecture.activation_function"),
        "no-bias-gelu-fusion": _placed("architecture.activation_function"),
        "bias-gelu-fusion": _placed("architecture.activation_function"),
        "no-position-embedding": Flag("dropped", "rotary positions have no embeddings (without them: no place)"),
        "kv-channels": Flag("unplaced", "heads of another size than the hidden size by their number"),
        "rotary-percent": Flag("unplaced", "rotary positions on a part of each head"),
        "use-rope-scaling": Flag("unplaced", "scaled rotary positions"),
        "add-qkv-bias": Flag("unplaced", "biases of queries, keys and values alone"),
        "qk-layernorm": Flag("unplaced", "norms of queries and keys"),
        "num-experts": Flag("unplaced", EXPERTS),
        "expert-model-parallel-size": Flag("unplaced", EXPERTS),
        "moe-router-topk": Flag("unplaced", EXPERTS),
        "moe-aux-loss-coeff": Flag("unplaced", EXPERTS),
    },
    "Data": {
        "seq-length": _placed("data.sequence_length", "32"),
        "data-path": _placed("data.train", "0.5 a 0.5 b"),
        "train-data-path": _placed("data.train", "c"),
        "valid-data-path": _placed("data.validation", "d"),
        "split": _placed("data.split", "998,1,1"),
        "seed": _placed("seed", "7"),
        "reset-position-ids": _placed("objective.layout"),
        "reset-attention-mask": _placed("objective.layout"),
        "eod-mask-loss": _placed("objective.eod_mask_loss"),
        "skip-train-iteration-range": _placed("data.skip_steps", "5-9"),
        "test-data-path": Flag("dropped", "nothing is tested at a run's end"),
        "dataloader-type": Flag("dropped", "order follows from the seed: each row once an epoch"),
        "tokenizer-type": Flag("dropped", TOKENS),
        "tokenizer-model": Flag("dropped", TOKENS),
        "tokenizer-name-or-path": Flag("dropped", TOKENS),
        "vocab-file": Flag("dropped", TOKENS),
        "merge-file": Flag("dropped", TOKENS),
        "vocab-size": Flag("dropped", TOKENS),
        "make-vocab-size-divisible-by": Flag("dropped", "vocabularies are not padded; `export --format megatron` does"),
        "data-impl": Flag("dropped", "stores are mapped into memory"),
        "data-cache-path": Flag("dropped", "orders are computed, not stored"),
        "num-workers": Flag("dropped", "rows are read ahead by themselves"),
        "num-dataset-builder-threads": Flag("dropped", "orders are computed, not built"),
        "no-create-attention-mask-in-dataloader": Flag("dropped", HOW),
        "train-data-exact-num-epochs": Flag("unplaced", "epochs of the data: `epochs` says a run's length by them"),
    },
    "Optimizer and schedule": {
        "optimizer": _placed("optimizer.type", "adam"),
        "lr": _placed("optimizer.learning_rate", "2e-4"),
        "adam-beta1": _placed("optimizer.betas", "0.8"),
        "adam-beta2": _placed("optimizer.betas", "0.95"),
        "adam-eps": _placed("optimizer.eps", "1e-5"),
        "weight-decay": _placed("optimizer.weight_decay", "0.2"),
        "clip-grad": _placed("max_grad_norm", "0.8"),
        "lr-decay-style": _placed("schedule.type", "cosine"),
        "min-lr": _placed("schedule.min_lr", "1e-6"),
        "lr-decay-iters": _placed("schedule.lr_decay_steps", "900"),
        "lr-decay-samples": _placed("schedule.lr_decay_steps", "6400"),
        "lr-decay-tokens": _placed("schedule.lr_decay_tokens", "300000"),
        "lr-warmup-iters": _placed("schedule.warmup_steps", "10"),
        "lr-warmup-samples": _placed("schedule.warmup_steps", "640"),
        "lr-warmup-tokens": _placed("schedule.warmup_tokens", "30000"),
        "lr-warmup-fraction": _placed("schedule.warmup_steps", "0.1"),
        "lr-wsd-decay-style": _placed("schedule.decay_type", "linear"),
        "lr-wsd-decay-iters": _placed("schedule.decay_steps", "100"),
        "use-z-loss": _placed("objective.z_loss"),
        "lr-warmup-init": Flag("unplaced", "a first learning rate above 0"),
        "weight-decay-incr-style": Flag("unplaced", "a weight decay that changes"),
        "start-weight-decay": Flag("unplaced", "a weight decay that changes"),
        "end-weight-decay": Flag("unplaced", "a weight decay that changes"),
    },
    "Batch and length": {
        "micro-batch-size": _placed("micro_batch_size", "2"),
        "global-batch-size": _placed("batch_size", "32"),
        "train-iters": _placed("max_steps", "500"),
        "train-samples": _placed("max_steps", "64000"),
        "train-tokens": _placed("max_tokens", "5000000"),
        "exit-duration-in-mins": _placed("max_minutes", "90"),
        "rampup-batch-size": Flag("unplaced", "a batch that grows"),
        "exit-interval": Flag("unplaced", "ending a process every so many steps"),
    },
    "Numbers and memory": {
        "bf16": _placed("precision"),
        "fp16": _placed("precision"),
        "use-flash-attn": _placed("attention"),
        "use-flash-attn-v2": _placed("attention"),
        "attention-softmax-in-fp32": Flag("dropped", "attention adds up in float32 always"),
        "accumulate-allreduce-grads-in-fp32": Flag("dropped", "gradients are float32 always"),
        "initial-loss-scale": _placed("loss_scaling.init_scale", "4096"),
        "loss-scale": _placed("loss_scaling.fixed", "128"),
        "loss-scale-window": _placed("loss_scaling.growth_interval", "500"),
        "min-loss-scale": _placed("loss_scaling.min_scale", "2"),
        "hysteresis": _placed("loss_scaling.hysteresis", "3"),
        "recompute-activations": _placed("activation_checkpointing"),
        "recompute-granularity": _placed("activation_checkpointing", "full"),
        "checkpoint-activations": _placed("activation_checkpointing"),
        "deepspeed-activation-checkpointing": _placed("activation_checkpointing"),
        "recompute-method": Flag("dropped", AGAIN),
        "recompute-num-layers": Flag("dropped", AGAIN),
        "fp8-format": _placed("precision", "hybrid"),
        "fp8-hybrid": _placed("precision"),
        "fp8-amax-compute-algo": Flag("unplaced", EIGHT),
        "fp8-amax-history-len": Flag("unplaced", EIGHT),
        "no-fp8-wgrad": Flag("unplaced", EIGHT),
    },
    "Processes": {
        "zero-stage": _placed("parallel.zero_stage", "2"),
        "use-distributed-optimizer": _placed("parallel.zero_stage"),
        "distributed-timeout-minutes": _placed("parallel.timeout_seconds", "30"),
        "deepspeed": Flag("dropped", "the engine follows from zero-stage"),
        "deepspeed-config": Flag("unplaced", "what that file sets beside batch sizes, precision and the stage of ZeRO"),
        "tensor-model-parallel-size": _placed("parallel.tp_size", "2"),
        "pipeline-model-parallel-size": _placed("parallel.pp_size", "2"),
        "context-parallel-size": Flag("unplaced", f"1 is nothing; above, {NO_RING}"),
        "ds-sequence-parallel-size": _placed("parallel.sp_size", "2"),
        "num-layers-per-virtual-pipeline-stage": _placed("parallel.pp_stages_per_process", "1"),
        "sequence-parallel": Flag("dropped", "shares what tensor parallelism leaves whole, with the same numbers"),
        "no-pipeline-parallel": Flag("dropped", "so where pp_size is 1"),
        "distributed-backend": Flag("dropped", "chosen by the device"),
        "overlap-grad-reduce": Flag("dropped", HOW),
        "overlap-param-gather": Flag("dropped", HOW),
        "use-pin-memory": Flag("dropped", HOW),
        "no-async-tensor-model-parallel-allreduce": Flag("dropped", HOW),
    },
    "Saving, validating, logging": {
        "save-interval": _placed("checkpoint.save_steps", "50"),
        "eval-interval": _placed("evaluation.steps", "25"),
        "eval-iters": _placed("evaluation.batches", "4"),
        "log-interval": _placed("logging_steps", "1"),
        "tensorboard-dir": _placed("trackers", "board"),
        "save": Flag("dropped", FOLDER),
        "load": Flag("dropped", RESUMED),
        "use-checkpoint-args": Flag("dropped", RESUMED),
        "use-checkpoint-opt_param-scheduler": Flag("dropped", RESUMED),
        "override-opt_param-scheduler": Flag("dropped", RESUMED),
        "ckpt-format": Flag("dropped", "checkpoints have a format of their own"),
        "finetune": _placed("start_from"),
        "no-load-optim": _placed("start_from"),
        "no-load-rng": Flag("dropped", "no state of a random generator is kept"),
        "no-save-optim": Flag("unplaced", "checkpoints without an optimizer"),
        "no-save-rng": Flag("dropped", "no state of a random generator is kept"),
        "wandb-project": _placed("trackers", "llama"),
        "wandb-name": _placed("trackers", "first"),
        "wandb-exp-name": _placed("trackers", "first"),
        "wandb-entity": _placed("trackers", "lab"),
        "wandb-group": _placed("trackers", "nodes"),
        "wandb-tag": _placed("trackers", "debug"),
        "use-wandb": _placed("trackers"),
        "log-throughput": Flag("dropped", LOGGED),
        "log-params-norm": Flag("unplaced", "norms of weights"),
        "log-num-zeros-in-grad": Flag("unplaced", "zeros among gradients"),
        "log-timers-to-tensorboard": Flag("dropped", "metrics.jsonl has the times of steps"),
        "log-batch-size-to-tensorboard": Flag("dropped", "the batch is what the parameters say"),
        "log-validation-ppl-to-tensorboard": Flag("dropped", LOGGED),
        "log-memory-to-tensorboard": Flag("dropped", HOW),
        "log-optimizer-states-to-tensorboard": Flag("unplaced", "norms of the optimizer's states"),
        "tensorboard-queue-size": Flag("dropped", "trackers sit behind a queue that never makes the run wait"),
        "tensorboard-log-interval": Flag("dropped", "numbers are shown when they are logged"),
        "timing-log-level": Flag("dropped", HOW),
    },
    "Megatron's own": {
        "use-mcore-models": Flag("dropped", HOW),
        "transformer-impl": Flag("dropped", HOW),
        "attention-backend": Flag("dropped", HOW),
        "no-masked-softmax-fusion": Flag("dropped", HOW),
        "no-bias-dropout-fusion": Flag("dropped", HOW),
        "no-bias-swiglu-fusion": Flag("dropped", HOW),
        "no-rope-fusion": Flag("dropped", HOW),
        "no-gradient-accumulation-fusion": Flag("dropped", HOW),
        "no-persist-layer-norm": Flag("dropped", HOW),
        "no-query-key-layer-scaling": Flag("dropped", HOW),
        "apply-query-key-layer-scaling": Flag("dropped", HOW),
        "use-cpu-initialization": Flag("dropped", HOW),
        "local_rank": Flag("dropped", "a launcher's variable says it"),
    },
}
"""By what they are about, under the names that the programs give them."""

FLAGS: Mapping[str, Flag] = {name: flag for group in GROUPS.values() for name, flag in group.items()}


def page() -> str:
    """The table as a page in Markdown."""
    lines = [
        "# What Megatron's options become",
        "",
        "`terakoya parameters import megatron FILE.sh` reads the script that starts a `pretrain_gpt.py` of Megatron-LM",
        "or Megatron-DeepSpeed, and writes the parameter JSON of the same run. Its report names each option of the",
        "script: what it became, why nothing is lost without it, or that there is no place for it. One that is not in",
        "this table is reported as unknown. Keys are those of a Llama; a GPT-2's are `n_inner`, `layer_norm_epsilon`,",
        "`attn_pdrop`. A value, or another option, may change the verdict: the report says it.",
        "[What the other files and scripts of such projects become](../../../parameters/FROM_OTHER_TRAINERS.md).",
    ]
    verdicts = {"placed": "", "dropped": "dropped: ", "unplaced": "no place: "}
    for title, flags in GROUPS.items():
        lines += ["", f"## {title}", "", "| Option | Becomes |", "|---|---|"]
        for name, flag in flags.items():
            became = f"`{flag.text}`" if flag.fate == "placed" else verdicts[flag.fate] + flag.text
            lines.append(f"| `--{name}` | {became} |")
    return "\n".join(lines) + "\n"
