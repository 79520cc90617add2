"""Table of the options of pretrain_gpt.py in Megatron-LM and Megatron-DeepSpeed, with what each becomes.

`MEGATRON_FLAGS.md` in this folder is the output of `page()`. A test checks that the page and the conversion agree with
the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["mapped", "ignored", "unsupported"]


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
        outcome: the option is mapped to a key, can be ignored without loss, or is not supported.
        text: the key; or why the option is ignored, or what is not supported.
        sample: a value for tests of a mapped option; "" for a switch.
    """

    outcome: Outcome
    text: str
    sample: str = ""


def _map_to(text: str, sample: str = "") -> Flag:
    return Flag("mapped", text, sample)


HOW = "an implementation detail of Megatron"
LOGGED = "always logged"
RESUMED = "a run resumes from its newest checkpoint by itself, with its own parameters"
FOLDER = "the run's folder is `--out` of `terakoya train`"
TOKENS = "a store contains its tokenizer"
RECOMPUTED = "every block is recomputed"
EXPERTS = "a mixture of experts"
FP8_SCALING = "scaling of 8-bit products; accelerate's recipe decides it"

GROUPS: Mapping[str, Mapping[str, Flag]] = {
    "Model": {
        "num-layers": _map_to("architecture.num_hidden_layers", "3"),
        "hidden-size": _map_to("architecture.hidden_size", "96"),
        "ffn-hidden-size": _map_to("architecture.intermediate_size", "320"),
        "num-attention-heads": _map_to("architecture.num_attention_heads", "8"),
        "num-query-groups": _map_to("architecture.num_key_value_heads", "2"),
        "num-key-value-heads": _map_to("architecture.num_key_value_heads", "2"),
        "group-query-attention": _map_to("architecture.num_key_value_heads"),
        "max-position-embeddings": _map_to("architecture.max_position_embeddings", "128"),
        "position-embedding-type": _map_to("architecture.type", "rope"),
        "use-rotary-position-embeddings": _map_to("architecture.type"),
        "swiglu": _map_to("architecture.type"),
        "normalization": _map_to("architecture.type", "RMSNorm"),
        "disable-bias-linear": _map_to("architecture.type"),
        "rotary-base": _map_to("architecture.rope_theta", "500000"),
        "rope-theta": _map_to("architecture.rope_theta", "500000"),
        "norm-epsilon": _map_to("architecture.rms_norm_eps", "1e-4"),
        "layernorm-epsilon": _map_to("architecture.rms_norm_eps", "1e-4"),
        "untie-embeddings-and-output-weights": _map_to("architecture.tie_word_embeddings"),
        "init-method-std": _map_to("architecture.initializer_range", "0.008"),
        "attention-dropout": _map_to("architecture.attention_dropout", "0.2"),
        "hidden-dropout": _map_to("architecture.resid_pdrop", "0.2"),
        "openai-gelu": _map_to("architecture.activation_function"),
        "no-bias-gelu-fusion": _map_to("architecture.activation_function"),
        "bias-gelu-fusion": _map_to("architecture.activation_function"),
        "no-position-embedding": Flag(
            "ignored", "rotary positions have no embeddings (other positions: not supported)"
        ),
        "kv-channels": Flag("unsupported", "heads of another size than the hidden size divided by their number"),
        "rotary-percent": Flag("unsupported", "rotary positions on a part of each head"),
        "use-rope-scaling": Flag("unsupported", "scaled rotary positions; set `architecture.rope_scaling`"),
        "add-qkv-bias": Flag("unsupported", "biases of only queries, keys and values"),
        "qk-layernorm": Flag("unsupported", "norms of queries and keys"),
        "num-experts": Flag("unsupported", EXPERTS),
        "expert-model-parallel-size": Flag("unsupported", EXPERTS),
        "moe-router-topk": Flag("unsupported", EXPERTS),
        "moe-aux-loss-coeff": Flag("unsupported", EXPERTS),
    },
    "Data": {
        "seq-length": _map_to("data.sequence_length", "32"),
        "data-path": _map_to("data.train", "0.5 a 0.5 b"),
        "train-data-path": _map_to("data.train", "c"),
        "valid-data-path": _map_to("data.validation", "d"),
        "split": _map_to("data.split", "998,1,1"),
        "seed": _map_to("seed", "7"),
        "reset-position-ids": _map_to("objective.layout"),
        "reset-attention-mask": _map_to("objective.layout"),
        "eod-mask-loss": _map_to("objective.eod_mask_loss"),
        "skip-train-iteration-range": _map_to("data.skip_steps", "5-9"),
        "test-data-path": Flag("ignored", "there is no test at the end of a run"),
        "dataloader-type": Flag("ignored", "the order follows from the seed; each row comes once per epoch"),
        "tokenizer-type": Flag("ignored", TOKENS),
        "tokenizer-model": Flag("ignored", TOKENS),
        "tokenizer-name-or-path": Flag("ignored", TOKENS),
        "vocab-file": Flag("ignored", TOKENS),
        "merge-file": Flag("ignored", TOKENS),
        "vocab-size": Flag("ignored", TOKENS),
        "make-vocab-size-divisible-by": Flag("ignored", "vocabularies are not padded; `export --format megatron` pads"),
        "data-impl": Flag("ignored", "stores are memory-mapped"),
        "data-cache-path": Flag("ignored", "the order of rows is computed, not stored"),
        "num-workers": Flag("ignored", "rows are always read ahead"),
        "num-dataset-builder-threads": Flag("ignored", "the order of rows is computed, not built"),
        "no-create-attention-mask-in-dataloader": Flag("ignored", HOW),
        "train-data-exact-num-epochs": Flag("unsupported", "a length in epochs of the data; set `epochs`"),
    },
    "Optimizer and schedule": {
        "optimizer": _map_to("optimizer.type", "adam"),
        "lr": _map_to("optimizer.learning_rate", "2e-4"),
        "adam-beta1": _map_to("optimizer.betas", "0.8"),
        "adam-beta2": _map_to("optimizer.betas", "0.95"),
        "adam-eps": _map_to("optimizer.eps", "1e-5"),
        "weight-decay": _map_to("optimizer.weight_decay", "0.2"),
        "clip-grad": _map_to("max_grad_norm", "0.8"),
        "lr-decay-style": _map_to("schedule.type", "cosine"),
        "min-lr": _map_to("schedule.min_lr", "1e-6"),
        "lr-decay-iters": _map_to("schedule.lr_decay_steps", "900"),
        "lr-decay-samples": _map_to("schedule.lr_decay_steps", "6400"),
        "lr-decay-tokens": _map_to("schedule.lr_decay_tokens", "300000"),
        "lr-warmup-iters": _map_to("schedule.warmup_steps", "10"),
        "lr-warmup-samples": _map_to("schedule.warmup_steps", "640"),
        "lr-warmup-tokens": _map_to("schedule.warmup_tokens", "30000"),
        "lr-warmup-fraction": _map_to("schedule.warmup_steps", "0.1"),
        "lr-wsd-decay-style": _map_to("schedule.decay_type", "linear"),
        "lr-wsd-decay-iters": _map_to("schedule.decay_steps", "100"),
        "use-z-loss": _map_to("objective.z_loss"),
        "lr-warmup-init": Flag("unsupported", "an initial learning rate above 0"),
        "weight-decay-incr-style": Flag("unsupported", "a weight decay that changes during the run"),
        "start-weight-decay": Flag("unsupported", "a weight decay that changes during the run"),
        "end-weight-decay": Flag("unsupported", "a weight decay that changes during the run"),
    },
    "Batch and length": {
        "micro-batch-size": _map_to("micro_batch_size", "2"),
        "global-batch-size": _map_to("batch_size", "32"),
        "train-iters": _map_to("max_steps", "500"),
        "train-samples": _map_to("max_steps", "64000"),
        "train-tokens": _map_to("max_tokens", "5000000"),
        "exit-duration-in-mins": _map_to("max_minutes", "90"),
        "rampup-batch-size": Flag("unsupported", "a batch size that grows; write `phases`"),
        "exit-interval": Flag("unsupported", "ending the process every N steps"),
    },
    "Numbers and memory": {
        "bf16": _map_to("precision"),
        "fp16": _map_to("precision"),
        "use-flash-attn": _map_to("attention"),
        "use-flash-attn-v2": _map_to("attention"),
        "attention-softmax-in-fp32": Flag("ignored", "attention always accumulates in float32"),
        "accumulate-allreduce-grads-in-fp32": Flag("ignored", "gradients are always float32"),
        "initial-loss-scale": _map_to("loss_scaling.init_scale", "4096"),
        "loss-scale": _map_to("loss_scaling.fixed", "128"),
        "loss-scale-window": _map_to("loss_scaling.growth_interval", "500"),
        "min-loss-scale": _map_to("loss_scaling.min_scale", "2"),
        "hysteresis": _map_to("loss_scaling.hysteresis", "3"),
        "recompute-activations": _map_to("activation_checkpointing"),
        "recompute-granularity": _map_to("activation_checkpointing", "full"),
        "checkpoint-activations": _map_to("activation_checkpointing"),
        "deepspeed-activation-checkpointing": _map_to("activation_checkpointing"),
        "recompute-method": Flag("ignored", RECOMPUTED),
        "recompute-num-layers": Flag("ignored", RECOMPUTED),
        "fp8-format": _map_to("precision", "hybrid"),
        "fp8-hybrid": _map_to("precision"),
        "fp8-amax-compute-algo": Flag("unsupported", FP8_SCALING),
        "fp8-amax-history-len": Flag("unsupported", FP8_SCALING),
        "no-fp8-wgrad": Flag("unsupported", FP8_SCALING),
    },
    "Processes": {
        "zero-stage": _map_to("parallel.zero_stage", "2"),
        "use-distributed-optimizer": _map_to("parallel.zero_stage"),
        "distributed-timeout-minutes": _map_to("parallel.timeout_seconds", "30"),
        "deepspeed": Flag("ignored", "the engine follows from zero-stage"),
        "deepspeed-config": Flag(
            "unsupported", "settings of the file other than batch sizes, precision and ZeRO stage"
        ),
        "tensor-model-parallel-size": _map_to("parallel.tp_size", "2"),
        "pipeline-model-parallel-size": _map_to("parallel.pp_size", "2"),
        "context-parallel-size": _map_to("parallel.cp_size", "2"),
        "ds-sequence-parallel-size": _map_to("parallel.sp_size", "2"),
        "num-layers-per-virtual-pipeline-stage": _map_to("parallel.pp_stages_per_process", "1"),
        "sequence-parallel": _map_to("parallel.sequence_parallel"),
        "no-pipeline-parallel": Flag("ignored", "the same as pp_size 1"),
        "distributed-backend": Flag("ignored", "follows from the device"),
        "overlap-grad-reduce": Flag("ignored", HOW),
        "overlap-param-gather": Flag("ignored", HOW),
        "use-pin-memory": Flag("ignored", HOW),
        "no-async-tensor-model-parallel-allreduce": Flag("ignored", HOW),
    },
    "Saving, validating, logging": {
        "save-interval": _map_to("checkpoint.save_steps", "50"),
        "eval-interval": _map_to("evaluation.steps", "25"),
        "eval-iters": _map_to("evaluation.batches", "4"),
        "log-interval": _map_to("logging_steps", "1"),
        "tensorboard-dir": _map_to("trackers", "board"),
        "save": Flag("ignored", FOLDER),
        "load": Flag("ignored", RESUMED),
        "use-checkpoint-args": Flag("ignored", RESUMED),
        "use-checkpoint-opt_param-scheduler": Flag("ignored", RESUMED),
        "override-opt_param-scheduler": Flag("ignored", RESUMED),
        "ckpt-format": Flag("ignored", "checkpoints have their own format"),
        "finetune": _map_to("start_from"),
        "no-load-optim": _map_to("start_from"),
        "no-load-rng": Flag("ignored", "no state of a random generator is saved"),
        "no-save-optim": Flag("unsupported", "checkpoints without an optimizer"),
        "no-save-rng": Flag("ignored", "no state of a random generator is saved"),
        "wandb-project": _map_to("trackers", "llama"),
        "wandb-name": _map_to("trackers", "first"),
        "wandb-exp-name": _map_to("trackers", "first"),
        "wandb-entity": _map_to("trackers", "lab"),
        "wandb-group": _map_to("trackers", "nodes"),
        "wandb-tag": _map_to("trackers", "debug"),
        "use-wandb": _map_to("trackers"),
        "log-throughput": Flag("ignored", LOGGED),
        "log-params-norm": Flag("unsupported", "norms of weights"),
        "log-num-zeros-in-grad": Flag("unsupported", "zeros among gradients"),
        "log-timers-to-tensorboard": Flag("ignored", "metrics.jsonl contains the times of steps"),
        "log-batch-size-to-tensorboard": Flag("ignored", "the parameters set the batch size"),
        "log-validation-ppl-to-tensorboard": Flag("ignored", LOGGED),
        "log-memory-to-tensorboard": Flag("ignored", HOW),
        "log-optimizer-states-to-tensorboard": Flag("unsupported", "norms of the optimizer's states"),
        "tensorboard-queue-size": Flag("ignored", "trackers read from a queue that never makes the run wait"),
        "tensorboard-log-interval": Flag("ignored", "numbers are sent when they are logged"),
        "timing-log-level": Flag("ignored", HOW),
    },
    "Megatron's own": {
        "use-mcore-models": Flag("ignored", HOW),
        "transformer-impl": Flag("ignored", HOW),
        "attention-backend": Flag("ignored", HOW),
        "no-masked-softmax-fusion": Flag("ignored", HOW),
        "no-bias-dropout-fusion": Flag("ignored", HOW),
        "no-bias-swiglu-fusion": Flag("ignored", HOW),
        "no-rope-fusion": Flag("ignored", HOW),
        "no-gradient-accumulation-fusion": Flag("ignored", HOW),
        "no-persist-layer-norm": Flag("ignored", HOW),
        "no-query-key-layer-scaling": Flag("ignored", HOW),
        "apply-query-key-layer-scaling": Flag("ignored", HOW),
        "use-cpu-initialization": Flag("ignored", HOW),
        "local_rank": Flag("ignored", "an environment variable of the launcher sets it"),
    },
}
"""The options by topic, under the names that the programs use."""

FLAGS: Mapping[str, Flag] = {name: flag for group in GROUPS.values() for name, flag in group.items()}


def page() -> str:
    """Returns the table as a page in Markdown."""
    lines = [
        "# What Megatron's options become",
        "",
        "`terakoya parameters import megatron FILE.sh` reads the script that starts a `pretrain_gpt.py` of Megatron-LM",
        "or Megatron-DeepSpeed, and writes the parameter JSON of the same run. Its report lists each option of the",
        "script: the key that it becomes, why it is ignored, or that it is not supported. An option that is not in",
        "this table is reported as unknown. Keys are those of a Llama; a GPT-2's are `n_inner`, `layer_norm_epsilon`,",
        "`attn_pdrop`. A value, or another option, may change the outcome; the report says so.",
        "[What the other files and scripts of such projects become](../../parameters/FROM_OTHER_TRAINERS.md).",
    ]
    prefixes = {"ignored": "ignored: ", "unsupported": "not supported: "}
    for title, flags in GROUPS.items():
        lines += ["", f"## {title}", "", "| Option | Becomes |", "|---|---|"]
        for name, flag in flags.items():
            text = f"`{flag.text}`" if flag.outcome == "mapped" else prefixes[flag.outcome] + flag.text
            lines.append(f"| `--{name}` | {text} |")
    return "\n".join(lines) + "\n"
