"""What keys of other trainers are called here, and where a key belongs: the advice for a key that does not exist.

The names are those of Transformers' `TrainingArguments` and configs, of axolotl, LLaMA-Factory, litgpt, nanoGPT,
Megatron-LM, DeepSpeed and retarfi/language-pretraining.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from terakoya.json_settings.problems import models_in
from terakoya.plugins.families import missing_family

ELSEWHERE: Mapping[str, str] = {
    "optimizer.learning_rate": "lr base_lr peak_lr max_lr",
    "optimizer.type": "optim optimizer_name optimizer_type use_adamw",
    "optimizer.weight_decay": "wd",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 beta_1 beta_2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "schedule.type": "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style scheduler scheduler_type",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "schedule.lr_decay_steps": "lr_decay_iters",
    "schedule.min_lr": "min_learning_rate lr_min",
    "max_steps": "max_iters max_iterations train_steps train_iters num_train_steps num_training_steps "
    "total_steps num_steps",
    "epochs": "num_train_epochs num_epochs max_epochs n_epochs train_epochs",
    "max_tokens": "train_tokens total_tokens",
    "max_minutes": "exit_duration_in_mins exit_duration max_time",
    "batch_size": "global_batch_size train_batch_size total_batch_size per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
    "per_device_batch_size device_batch_size micro_batch",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping gradient_clip_val clip_grad_norm max_norm",
    "deterministic": "full_determinism deterministic_mode",
    "precision": "bf16 fp16 fp8 mixed_precision dtype torch_dtype data_type half",
    "attention": "attn_implementation flash_attention use_flash_attention_2 use_flash_attn flash_attn",
    "compile": "torch_compile",
    "activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute_granularity "
    "recompute_activations checkpoint_activations",
    "data.train": "dataset datasets dataset_name dataset_path data_path data_files train_file train_files train_data",
    "data.validation": "eval_dataset eval_file eval_data validation_file validation_data valid_data",
    "data.split": "val_set_size val_size validation_split",
    "data.sequence_length": "sequence_len seq_length seq_len max_seq_length max_seq_len max_length cutoff_len "
    "block_size context_length context_len model_max_length",
    "objective.type": "mlm task",
    "objective.mlm_probability": "mlm_prob masked_lm_prob mask_prob mask_percent",
    "objective.layout": "group_by_length packing sample_packing neat_packing pad_to_sequence_len",
    "objective.loss_on": "train_on_inputs train_on_prompt mask_history mask_prompt",
    "objective.whole_word_mask": "whole_word_masking do_whole_word_mask wwm",
    "checkpoint.save_steps": "save_interval save_freq save_strategy checkpoint_freq checkpoint_interval ckpt_interval",
    "checkpoint.keep": "save_total_limit keep_last num_kept_checkpoints max_checkpoints",
    "evaluation.steps": "eval_steps validation_steps eval_interval eval_freq eval_strategy evaluation_strategy "
    "validation_freq val_check_interval",
    "evaluation.batches": "eval_iters eval_batches validation_batches",
    "logging_steps": "log_interval logging_freq logging_interval log_every log_every_n_steps",
    "trackers": "report_to logger loggers wandb wandb_project use_wandb tensorboard tensorboard_dir logging_dir",
    "start_from": "model_name_or_path base_model pretrained_model_name_or_path pretrained_model init_from "
    "init_checkpoint initial_checkpoint_dir",
    "start_from.vocabulary": "resize_vocab add_tokens",
    "activation_offloading": "offload_activations enable_activation_offloading",
    "events": "log_optimizer_state logits_output load_best_model_at_end early_stopping_patience callbacks",
    "frozen_layers": "flozen_layers freeze_layers num_frozen_layers",
    "seed": "random_seed data_seed train_seed",
    "architecture.type": "model_type model_arch",
    "architecture.hidden_size": "n_embd d_model dim model_dim embed_dim hidden_dim hidden_width",
    "architecture.num_hidden_layers": "n_layer n_layers num_layers number_of_layers depth",
    "architecture.num_attention_heads": "n_head n_heads num_heads num_attn_heads attention_heads",
    "architecture.num_key_value_heads": "n_kv_heads num_kv_heads num_query_groups",
    "architecture.intermediate_size": "ffn_hidden_size d_ff ffn_dim ffn_inner_hidden_size mlp_dim",
    "architecture.n_inner": "ffn_hidden_size d_ff ffn_dim intermediate_size",
    "architecture.d_model": "hidden_size n_embd model_dim",
    "architecture.num_layers": "num_hidden_layers n_layer n_layers number_of_layers",
    "architecture.num_heads": "num_attention_heads n_head n_heads attention_heads",
    "architecture.d_ff": "intermediate_size ffn_dim ffn_hidden_size",
    "architecture.max_position_embeddings": "n_positions n_ctx max_positions",
    "architecture.tie_word_embeddings": "tie_embeddings",
    "architecture.hidden_dropout_prob": "dropout hidden_dropout",
    "architecture.resid_pdrop": "dropout hidden_dropout",
    "architecture.attention_probs_dropout_prob": "attention_dropout",
    "architecture.attn_pdrop": "attention_dropout",
    "parallel.timeout_seconds": "ddp_timeout distributed_timeout_minutes",
    "parallel.engine": "deepspeed fsdp distributed_backend distributed_strategy",
    "parallel.dp_shard_size": "hsdp hybrid_shard fsdp_sharding_strategy data_parallel_shard_degree",
    "parallel.tp_size": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size mp_size",
    "parallel.pp_size": "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "lora.r": "lora_r lora_rank peft_lora_r",
    "lora.lora_alpha": "peft_lora_alpha",
    "lora.quantization": "load_in_4bit load_in_8bit bits bnb_4bit_quant_type quantization_bit quantization_config "
    "quantize qlora",
    "lora.target_modules": "lora_target lora_target_modules peft_target_modules",
}  # fmt: skip
"""Key path -> its names elsewhere. A name may stand at several keys: those that the run's components have are shown."""

VALUES: Mapping[str, str] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "gradient_checkpointing": "full",
    "use_flash_attention_2": "flash",
    "use_flash_attn": "flash",
    "flash_attention": "flash",
    "flash_attn": "flash",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "use_adamw": "adamw",
    "mlm": "masked_lm",
}
"""Name elsewhere -> the value that its key has here, for names that say a value."""

_VOCABULARY = (
    "a token store has the vocabulary of its tokenizer: choose it with `terakoya tokenizer train --vocab-size N`"
)
_TOKENIZER = "a token store has its tokenizer: choose it with `terakoya prepare CORPUS --tokenizer FOLDER --out STORE`"
_OUT = "the run's folder is given on the command line: --out RUN"
_RESUME = "the same command with the same --out continues a run; leave it out"
_ACCUMULATION = (
    'it follows from batch_size and micro_batch_size: "batch_size": {"-1": 256} with "micro_batch_size": 32 in one '
    "process is 8 micro-steps"
)
_NODES = (
    'the nodes follow from batch_size, which has an entry for each: {"0": ROWS, "1": ROWS, ...}; equal nodes are '
    '{"*": ROWS} with --nodes N on the command line'
)
_PROCESSES = "the processes are given on the command line: terakoya train --processes N, or by the launcher"
_NOTHING = "nothing has to be set for it; leave it out"

SENTENCES: Mapping[str, str] = {
    **dict.fromkeys(("vocab_size", "vocabulary_size", "padded_vocab_size"), _VOCABULARY),
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_path", "tokenizer_name_or_path", "tokenizer_dir"),
                    _TOKENIZER),
    **dict.fromkeys(("output_dir", "out_dir", "out", "save_dir", "model_dir", "checkpoint_dir"), _OUT),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "do_continue", "overwrite_output_dir", "load_full"), _RESUME),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accumulate_grad_batches"),
                    _ACCUMULATION),
    **dict.fromkeys(("nodes", "num_nodes", "nnodes", "num_machines"), _NODES),
    **dict.fromkeys(("num_processes", "nproc_per_node", "n_gpus", "num_gpus", "gpus", "devices"), _PROCESSES),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size", "val_batch_size"),
                    "validation computes micro_batch_size rows at once, too; leave it out"),
    **dict.fromkeys(("dataloader_num_workers", "num_workers", "do_train", "do_eval", "remove_unused_columns"),
                    _NOTHING),
}  # fmt: skip
"""Name elsewhere -> what to do, where no key of the parameter JSON is its equivalent."""

_PLACES: dict[str, list[str]] = {}
for _path, _names in ELSEWHERE.items():
    for _name in _names.split():
        _PLACES.setdefault(_name, []).append(_path)


def find_equivalent(name: str, paths: Iterable[str]) -> tuple[list[str], str | None]:
    """Returns the key paths among `paths` that mean `name`, a key of this or of another trainer, at most three; and,
    if there is none, a sentence that says what to do instead, or None.

    Hyphens count as underscores, and capitals do not count: `Learning-Rate` is `optimizer.learning_rate`.
    """
    name = name.lower().replace("-", "_")
    known = list(paths)
    same = [path for path in known if path.rpartition(".")[2] == name]
    found = same or [path for path in _PLACES.get(name, ()) if path in known]
    return found[:3], None if found else SENTENCES.get(name)


def explain_unknown_key(path: str, paths: Sequence[str]) -> str:
    """Returns the end of a sentence about the unknown key at `path`: what it is called or where it belongs here; "" if
    nothing is known. `paths` are the key paths that exist."""
    if family := missing_family("keys", path):
        return family
    above, _, name = path.rpartition(".")
    found, sentence = find_equivalent(name, paths)
    if found:
        value = f': "{VALUES[name]}"' if name in VALUES else ""
        return "; that is " + " or ".join(f'"{each}"{value}' for each in found) + " here"
    if sentence:
        return f"; {sentence}"
    here = [each.rpartition(".")[2] for each in paths if each.rpartition(".")[0] == above]
    if difflib.get_close_matches(name, here, n=1, cutoff=0.6):
        return ""  # a misspelt key of this level: the nearest one is named anyhow
    leaves = {each.rpartition(".")[2] for each in paths}
    near = [path for leaf in difflib.get_close_matches(name, leaves, n=2, cutoff=0.8)
            for path in paths if path.rpartition(".")[2] == leaf]  # fmt: skip
    return "; did you mean " + " or ".join(f'"{each}"' for each in near[:3]) + "?" if near else ""


def key_paths(model: type[BaseModel], components: Mapping[str, Iterable[type[BaseModel]]]) -> list[str]:
    """Returns the key path of every key of `model`; the keys of `components` hold one of these models each."""
    found: dict[str, None] = {}
    for name, field in model.model_fields.items():
        found[name] = None
        inner = components.get(name)
        if inner is not None:
            found[f"{name}.type"] = None
        own = (model for model, ending in models_in(field.annotation) if not ending)  # items of a list have no path
        for each in own if inner is None else inner:
            found.update(dict.fromkeys(f"{name}.{path}" for path in key_paths(each, {})))
    return list(found)
