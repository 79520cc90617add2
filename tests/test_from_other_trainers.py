"""The page for users of other trainers: it answers every key, and all commands and keys that it names exist."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from documented_commands import ROOT, check_command, find_command, verbs
from pydantic import BaseModel

from terakoya import plugins
from terakoya.config.other_names import find_equivalent
from terakoya.config.parameters import COMPONENTS, Parameters, all_key_paths

PAGE = ROOT / "parameters" / "FROM_OTHER_TRAINERS.md"
WORDS = {"nothing", "the same", "**not supported**"}
"""The words that the middle column may have besides commands and keys; each needs a reason in the right column."""

ASKED = {
    "A GPT by Megatron-DeepSpeed, from YAML files": """
        input output_dir model_prefix vocab_size character_coverage model_type num_threads train_extremely_large_corpus
        byte_fallback split_digits allow_whitespace_only_pieces remove_extra_whitespaces user_defined_symbols
        --json-keys --output-prefix --workers --append-eod --dataset-impl --tokenizer-type --tokenizer-model input_jsonl
        tokenized_data_path megatron_deepspeed_dir input_tokenizer_file output_model_dir save_interval model_size
        num_layers hidden_size num_attn_heads seq_len init_std global_batch_size lr min_lr zero_stage train_tokens
        train_samples exit_duration log_interval eval_interval eval_iters seed activation_checkpoint log_optimizer_state
        mp_size pp_size no_pp hostfile train_batch_size train_micro_batch_size_per_gpu steps_per_print gradient_clipping
        prescale_gradients fp16.enabled fp16.loss_scale fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale
        fp16.initial_scale_power wall_clock_breakdown wandb.enabled wandb.project input_model_dir huggingface_name
        output_tokenizer_and_model_dir test_prompt_text temp_dir
    """,
    "A GPT-J on SageMaker": """
        RAW_DATA_DIR SAVE_DIR BLOCK_SIZE JSON_NUM_TRAIN JSON_NUM_VAL NUM_PROC aws_config.role fsx_config.* INSTANCE_TYPE
        N_INSTANCE VOLUME_SIZE MAX_RUN MAX_STEP checkpoint_s3_uri metric_definitions max_context_width hidden_width
        num_layers num_heads vocab_size resid_pdrop embd_pdrop attn_pdrop tensor_parallel_degree
        pipeline_parallel_degree microbatches shard_optimizer_state fp16 activation_checkpointing offload_activations
        sharded_data_parallel_degree lr_decay_style lr_decay_iters warmup plateau min_lr load_partial load_full
        num_kept_checkpoints checkpoint_freq validation_freq logging_freq logits_output weight_decay use_adamw
        train_batch_size val_batch_size save_final_full_model skip_full_optimizer manual_partition prescaled_batch
        active_microbatches optimize data_type zipped_data n_gpus bf16 ddp_dist_backend grad_clip beta1 beta2
        seed same_seed log_param_norms log_reduced_training_loss use_bert_data epochs output-data-dir
        checkpoint-dir model-dir training-dir
        test-dir parallel_proc_data_processing fine_tune model_type intermediate_size num_heads_kv alibi
        summary_first_pdrop use_distributed_transformer checkpoint_sublayers initializer_range activation_strategy
        fast_mode static_mode delayed_param same_partition_load attention_in_fp32 residual_addition_in_fp32
        placement_strategy activation_loading_horizon skip_tracing query_key_layer_scaling fused_softmax flash_attention
        fused_dropout fused_bias_gelu gradient_accumulation rotary_pct rotary_emb_base validation_batches
        partition_assignment preserve_np_state fast_validation gather_if_shard clean_cache use_fsx lr
        enable_memory_profiling ci time_to_train throughput loss
    """,
    "A GPT in five steps, tuned on instructions": """
        --input_sentence_size --shuffle_input_sentence --num_threads --character_coverage --model_type
        --pretokenization_delimiter --input_tokenizer_file --output_model_dir --save_interval --wandb_entity
        --wandb_project --wandb_tag --hostfile --input_model_max_length --input_model_dir
        --output_tokenizer_and_model_dir --output_model_name --test_prompt_text --input_model_name_or_path --data_files
        --eval_data_files --instruction_template --response_template --max_seq_length --use_peft --peft_target_model
        --peft_lora_r --peft_lora_alpha --peft_lora_dropout --load_in_8bit --load_in_4bit --use_fast
    """,
    "A Llama by Megatron-LM": "--loader --saver --target-tensor-parallel-size --target-pipeline-parallel-size "
    "--hf-tokenizer-path --save-dtype --skip-train-iteration-range",
}
"""Keys, flags and constants of these systems' files, by heading."""

LLAMA = """
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size sequence-parallel num-layers
    hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups seq-length
    max-position-embeddings
    micro-batch-size global-batch-size train-iters tokenizer-type tokenizer-model data-path split distributed-backend
    init-method-std lr min-lr lr-decay-style lr-decay-iters weight-decay clip-grad lr-warmup-iters optimizer adam-beta1
    adam-beta2 adam-eps log-interval save-interval eval-interval eval-iters bf16 use-checkpoint-args
    untie-embeddings-and-output-weights no-position-embedding position-embedding-type rope-theta disable-bias-linear
    use-mcore-models normalization norm-epsilon no-masked-softmax-fusion attention-dropout hidden-dropout swiglu
    use-flash-attn attention-softmax-in-fp32 recompute-activations recompute-granularity transformer-impl fp8-format
    fp8-amax-compute-algo fp8-amax-history-len no-fp8-wgrad use-z-loss log-throughput wandb-name wandb-project
    wandb-entity use-distributed-optimizer finetune load save no-load-optim no-load-rng skip-train-iteration-range
"""
"""Every option of the scripts that train the Llama: answered in the table of Megatron's options."""


def rows() -> list[tuple[str, str, str, str]]:
    """(heading, then, here, why) of every row that is no heading of its own."""
    found, heading = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if heading and len(cells) == 3 and cells[0] not in ("There", "---") and not cells[0].startswith("**"):
            found.append((heading, cells[0], cells[1], cells[2]))
    return found


def codes(text: str) -> list[str]:
    return [code.replace(r"\|", "|") for code in re.findall(r"`([^`]+)`", text)]


def has_key(path: str) -> bool:
    """Whether `path` is a key of the parameter JSON, of some component of its kind."""
    head, *rest = path.split(".")
    if head not in Parameters.model_fields or not rest:
        return head in Parameters.model_fields
    if head in COMPONENTS:
        kinds = plugins.registry()
        components = [kinds.component(COMPONENTS[head], name) for name in kinds.names(COMPONENTS[head])]
        return rest == ["type"] or any(rest == [field] for each in components for field in each.model_fields)
    annotation: Any = Parameters.model_fields[head].annotation
    kinds_of_value = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
    models = [each for each in kinds_of_value if issubclass(each, BaseModel)]
    return any(rest == [name] for each in models for name in each.model_fields)


def test_what_the_page_names_exists() -> None:
    commands, keys = 0, set()
    for _, then, here, why in rows():
        for code in codes(here):
            if code.startswith("terakoya "):
                check_command(code)
                commands += 1
            else:
                assert has_key(code), f"{then}: {code} is no key"
                keys.add(code)
        rest = re.sub(r"`[^`]+`", "", here)
        words = [word.strip() for word in re.split(r",| or ", rest) if word.strip()]
        assert (words or codes(here)) and set(words) <= WORDS, f"{then}: {here}"
        assert why or not words, f"{then}: {here}, but why?"
    assert commands > 60 and len(keys) > 50


def test_keys_that_do_not_exist_are_seen() -> None:
    assert has_key("lora.r") and has_key("data.skip_steps") and has_key("schedule.min_lr") and has_key("trackers")
    assert not any(map(has_key, ("lora.rank", "data.min_lr", "schedule.floor", "tracker", "seed.seed")))


@pytest.mark.parametrize("heading", ASKED)
def test_every_key_is_answered(heading: str) -> None:
    answered = {code.split()[0] for title, then, _, _ in rows() if title == heading for code in codes(then)}
    assert not set(ASKED[heading].split()) - answered


def test_every_option_of_the_llama_is_in_the_table() -> None:
    flags = pytest.importorskip("terakoya_megatron.script_flags").FLAGS
    assert not set(LLAMA.split()) - set(flags)
    named = {code.split()[0].removeprefix("--") for title, then, _, _ in rows() for code in codes(then)
             if title == "A Llama by Megatron-LM" and code.startswith("--")}  # fmt: skip
    assert len(named & set(flags)) > 12


UNSUPPORTED = {"alibi", "--no-fp8-wgrad"}
"""The keys and flags that the page calls not supported."""


def test_what_is_called_unsupported_has_no_key_no_option_and_no_equivalent() -> None:
    said = {code for _, then, here, _ in rows() if here == "**not supported**" for code in codes(then)}
    assert said == UNSUPPORTED
    paths = all_key_paths(plugins.registry())
    options = {flag for words in verbs() for parameter in find_command([words])[0].params for flag in parameter.opts}
    for name in said:
        bare = name.lstrip("-").replace("-", "_")
        assert find_equivalent(bare, paths) == ([], None), name
        assert f"--{bare.replace('_', '-')}" not in options and not any(bare in path for path in paths), name


def test_the_reasons_for_what_is_unsupported_hold() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for untrue in (
        "no tensor and no pipeline",
        "no launcher for SageMaker",
        "nothing is moved to the host",
        "no place",
    ):
        assert untrue not in page


def test_links_lead_somewhere() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", page):
        file, _, anchor = link.partition("#")
        assert not file or (PAGE.parent / file).exists(), link
        if anchor:
            titles = [
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                for title in re.findall(r"^## (.+)", page, re.M)
            ]
            assert anchor in titles, link
