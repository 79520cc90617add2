"""The conversion agrees with the page of Megatron's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_megatron import script_flags as flags
from terakoya_megatron.script_options import find_command
from terakoya_megatron.script_parameters import convert

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
BATCH = "--global-batch-size 64 --micro-batch-size 4 --lr 1e-3 --train-iters 1000 --data-path store"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"

INSTEAD = {
    "train-samples": ("train-iters",), "train-tokens": ("train-iters",), "train-data-path": ("data-path",),
    "lr-decay-iters": (), "use-rotary-position-embeddings": ("position-embedding-type",),
}  # fmt: skip
"""Options to remove when the option is added."""
WITH = {
    "num-query-groups": "--group-query-attention", "group-query-attention": "--num-query-groups 2",
    "lr-decay-iters": "--lr-decay-style cosine", "lr-decay-samples": "--lr-decay-style cosine",
    "lr-decay-tokens": "--lr-decay-style cosine", "min-lr": "--lr-decay-style cosine",
    "lr-wsd-decay-style": "--lr-decay-style WSD", "lr-wsd-decay-iters": "--lr-decay-style WSD",
    "eval-interval": "--split 90,10,0", "eval-iters": "--split 90,10,0",
    "distributed-timeout-minutes": "--zero-stage 1",
    "num-layers-per-virtual-pipeline-stage": "--pipeline-model-parallel-size 2",
    "sequence-parallel": "--tensor-model-parallel-size 2",
    "finetune": "--load old", "no-load-optim": "--load old",
    "initial-loss-scale": "--fp16", "loss-scale": "--fp16", "loss-scale-window": "--fp16", "min-loss-scale": "--fp16",
    "hysteresis": "--fp16", "use-flash-attn": "--bf16", "use-flash-attn-v2": "--bf16",
    "use-flash-attn-triton": "--bf16",
}  # fmt: skip
"""Further options that an option needs to have an effect."""
GPT2_ONLY = {"hidden-dropout", "openai-gelu", "no-bias-gelu-fusion", "bias-gelu-fusion"}
UNCHANGED = {"optimizer", "swiglu", "disable-bias-linear", "normalization", "bias-gelu-fusion", "openai-gelu"}
"""Options whose value is already the default: the key has the same value without them."""


def value_at(parameters: Any, path: str) -> Any:
    """Returns the value at the dotted path; None if there is none."""
    for key in path.split("."):
        parameters = parameters.get(key) if isinstance(parameters, dict) else None
    return parameters


def words(name: str) -> tuple[list[str], list[str]]:
    """Returns a command without the option `name` and the same command with it."""
    base = f"{SIZES} {BATCH}" + ("" if name in GPT2_ONLY else f" {LLAMA}") + f" {WITH.get(name, '')}"
    options = [option.split() for option in f" {base}".split(" --") if option.strip()]
    kept = [option for option in options if option[0] not in (name, *INSTEAD.get(name, ()))]
    without = [word for option in kept for word in (f"--{option[0]}", *option[1:])]
    return without, [*without, f"--{name}", *flags.FLAGS[name].sample.split()]


@pytest.mark.parametrize("name", [name for name, flag in flags.FLAGS.items() if flag.outcome == "mapped"])
def test_each_mapped_option_sets_its_key(name: str) -> None:
    without, command = words(name)
    key = flags.FLAGS[name].text
    found = convert(command, nodes=1)
    assert name in found.mapped, (found.unsupported, found.ignored)
    before, after = value_at(convert(without, nodes=1).parameters, key), value_at(found.parameters, key)
    assert after is not None
    assert (before == after) == (name in UNCHANGED)
    Parameters.from_dict(found.parameters, source=name)


@pytest.mark.parametrize("name", [name for name, flag in flags.FLAGS.items() if flag.outcome != "mapped"])
def test_each_other_option_is_recorded_and_changes_nothing(name: str) -> None:
    base = f"{SIZES} {BATCH} {LLAMA}".split()
    found = convert([*base, f"--{name}", "3"], nodes=1)
    recorded = found.ignored if flags.FLAGS[name].outcome == "ignored" else found.unsupported
    assert name in recorded and name not in found.mapped
    assert found.parameters == convert(base, nodes=1).parameters


def test_every_row_of_the_page_is_an_option() -> None:
    page = Path(flags.__file__).with_name("MEGATRON_FLAGS.md").read_text(encoding="utf-8")
    assert len(flags.FLAGS) == page.count("\n| ") - page.count("\n| Option |") > 170
    assert flags.FLAGS["data-path"] == flags.Flag("mapped", "data.train", "0.5 a 0.5 b")
    assert flags.FLAGS["save"] == flags.Flag("ignored", "the run's folder is `--out` of `terakoya train`")
    assert flags.FLAGS["no-save-rng"].outcome == "ignored" and flags.FLAGS["qk-layernorm"].outcome == "unsupported"


WHOLE = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536
--train-iters 12500 --lr 1.0E-4 --min-lr 1.0E-6 --lr-decay-style cosine --lr-decay-iters 12000 --lr-warmup-iters 1000
--weight-decay 0.1 --clip-grad 0.8 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-05 --bf16
--untie-embeddings-and-output-weights --no-position-embedding --position-embedding-type rope --rope-theta 500000.0
--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--use-flash-attn --use-z-loss --init-method-std 0.008 --data-path 0.3 a 0.7 b --split 998,1,1 --eval-interval 100
--eval-iters 20 --save-interval 500 --log-interval 1 --use-distributed-optimizer --tensor-model-parallel-size 2
--pipeline-model-parallel-size 1 --no-fp8-wgrad --num-layer 3 --recompute-activations --recompute-granularity selective
--load old --finetune --wandb-name tanuki --wandb-project Llama --wandb_tag debug --hysteresis 2
"""


def test_a_run_of_a_llama_is_converted() -> None:
    command = WHOLE.split()
    found = convert(command, nodes=3)
    assert found.parameters == {
        "data": {
            "sequence_length": 2048, "split": [998, 1, 1],
            "train": [{"store": "a", "weight": 0.3}, {"store": "b", "weight": 0.7}],
        },
        "architecture": {
            "type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "initializer_range": 0.008, "scaled_init": True,
            "tie_word_embeddings": False, "attention_dropout": 0.0,
        },
        "objective": {"type": "causal_lm", "layout": "megatron", "z_loss": 1e-4},
        "optimizer": {
            "type": "adamw", "learning_rate": 1e-4, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1
        },
        "schedule": {"type": "cosine", "min_lr": 1e-6, "lr_decay_steps": 12000, "warmup_steps": 1000},
        "batch_size": {"0": 512, "1": 512, "2": 512},
        "micro_batch_size": 1, "max_steps": 12500, "max_grad_norm": 0.8, "seed": 1234, "precision": "bf16",
        "attention": "flash", "parallel": {"engine": "fsdp", "tp_size": 2}, "logging_steps": 1,
        "checkpoint": {"save_steps": 500}, "evaluation": {"steps": 100, "batches": 20},
        "activation_checkpointing": "selective", "start_from": "old",
        "trackers": [{"type": "wandb", "name": "tanuki", "project": "Llama", "tags": ["debug"]}],
    }  # fmt: skip
    assert found.ignored["hysteresis"] == "only fp16 has a loss scale"
    assert any("terakoya import megatron old --out DIR" in note for note in found.notes)
    assert sorted(found.unsupported) == ["no-fp8-wgrad", "num-layer"]
    assert found.unsupported["num-layer"].startswith('3: unknown option; did you mean "num-layers"')
    Parameters.from_dict(found.parameters, source="test")


def test_model_parallel_sizes_are_converted() -> None:
    base = f"{SIZES} {BATCH} {LLAMA} --hidden-dropout 0".replace("--num-layers 2", "--num-layers 8")
    tensor, pipeline = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"

    def parallel(more: str) -> tuple[dict[str, Any], dict[str, str]]:
        found = convert(f"{base} {more}".split(), nodes=1)
        Parameters.from_dict(found.parameters, source="test")
        return found.parameters.get("parallel", {}), dict(found.unsupported)

    assert parallel(f"{tensor} 2 {pipeline} 1") == ({"tp_size": 2}, {})
    assert parallel(f"{pipeline} 2 --num-layers-per-virtual-pipeline-stage 1") == (
        {"pp_size": 2, "pp_stages_per_process": 4}, {},
    )  # fmt: skip
    assert parallel("--ds-sequence-parallel-size 2") == ({"sp_size": 2}, {})
    assert parallel("--context-parallel-size 2") == ({"cp_size": 2}, {})
    assert parallel("--context-parallel-size 1") == ({}, {})
    assert parallel(f"{tensor} 2 {pipeline} 2") == ({"tp_size": 2, "pp_size": 2}, {})
    assert parallel(f"{tensor} 2 {pipeline} 2 --zero-stage 0") == ({"tp_size": 2, "pp_size": 2}, {})
    for zero in ("--zero-stage 1", "--use-distributed-optimizer"):
        assert parallel(zero) == ({"engine": "deepspeed", "zero_stage": 1}, {})
        sharded = {"engine": "fsdp", "tp_size": 2, "pp_size": 2}
        assert parallel(f"{tensor} 2 {pipeline} 2 {zero}") == (sharded, {})


def test_precision_memory_and_trackers_are_converted() -> None:
    base = f"{SIZES} {BATCH}"
    found = convert(
        f"{base} --bf16 --fp8-hybrid --checkpoint-activations --tensorboard-dir a --use_wandb".split(), nodes=1
    )
    assert found.parameters["precision"] == "fp8" and found.parameters["activation_checkpointing"] == "full"
    assert found.parameters["trackers"] == [{"type": "tensorboard"}, {"type": "wandb"}]
    found = convert(f"{base} --bf16 --fp8-hybrid --zero-stage 1".split(), nodes=1)
    assert found.parameters["precision"] == "bf16" and "together with ZeRO" in found.unsupported["fp8-hybrid"]
    Parameters.from_dict(found.parameters, source="test")
    found = convert(f"{base} --fp16 --loss-scale 0 --hysteresis 2 --min-loss-scale 0.5".split(), nodes=1)
    assert found.parameters["loss_scaling"] == {"hysteresis": 2, "min_scale": 0.5}
    assert "a dynamic scale" in found.ignored["loss-scale"]
    found = convert(f"{base} --fp16 --loss-scale 64 --hysteresis 2 --finetune".split(), nodes=1)
    assert found.parameters["loss_scaling"] == {"fixed": 64} and "start_from" not in found.parameters
    assert found.ignored["hysteresis"] == "the scale is fixed" and "nothing to start from" in found.ignored["finetune"]
    found = convert(f"{base} --recompute-granularity blocks".split(), nodes=1)
    assert "blocks: another granularity" in found.unsupported["recompute-granularity"]


def test_one_store_is_shuffled_over_all_epochs_of_the_run() -> None:
    found = convert(f"{SIZES} {BATCH}".split(), nodes=1)
    assert found.parameters["objective"] == {"type": "causal_lm", "layout": "megatron", "samples": 64 * 1000}
    separated = convert(f"{SIZES} {BATCH} --reset-position-ids --reset-attention-mask --eod-mask-loss".split(), nodes=1)
    assert separated.parameters["objective"] == {"type": "causal_lm", "layout": "packed"}
    assert "nothing follows an end of document" in separated.ignored["eod-mask-loss"]


def test_a_gpt2_with_a_length_in_tokens_is_converted() -> None:
    command = (
        f"{SIZES} --global-batch-size 256 --micro-batch-size 1 --lr 6e-4 --min-lr 1e-6 --lr-decay-style cosine "
        "--lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000 --train-tokens 300000000000 "
        "--train-samples 9999999999 --data-path store --zero_stage 2 --exit-duration-in-mins 60 --normalization rmsnorm"
    ).split()
    found = convert(command, nodes=None)
    assert found.parameters["architecture"]["type"] == "gpt2"
    assert found.parameters["max_tokens"] == 300_000_000_000 and "max_steps" not in found.parameters
    assert found.parameters["schedule"] == {
        "type": "cosine", "min_lr": 1e-6, "lr_decay_tokens": 300_000_000_000, "warmup_tokens": 3_000_000_000
    }  # fmt: skip
    assert found.parameters["parallel"] == {"engine": "deepspeed", "zero_stage": 2}
    assert "samples" not in found.parameters["objective"]  # with a length in tokens, the number of rows is unknown
    assert found.parameters["max_minutes"] == 60
    assert "rmsnorm with these positions" in found.unsupported["normalization"]
    assert any('one node ("-1")' in note for note in found.notes)
    Parameters.from_dict(found.parameters, source="test")


@pytest.mark.parametrize(
    ("limits", "expected", "ignored"),
    [  # 64 rows of 64 tokens: 4,096 tokens a step
        ("--train-iters 100 --train-tokens 409_601", {"max_steps": 100}, "train-tokens"),
        ("--train-iters 100 --train-tokens 409_600", {"max_tokens": 409_600}, "train-iters"),
        ("--train-samples 6400 --train-tokens 1e9", {"max_steps": 100}, "train-tokens"),
        ("--train-samples 6400 --train-tokens 1e3", {"max_tokens": 1000}, "train-samples"),
    ],
)
def test_of_two_lengths_the_earlier_end_counts(limits: str, expected: dict[str, int], ignored: str) -> None:
    found = convert(f"{SIZES} {BATCH} {limits}".replace("--train-iters 1000 ", "").split(), nodes=1)
    lengths = {key: found.parameters[key] for key in ("max_steps", "max_tokens") if key in found.parameters}
    assert lengths == expected
    assert "ends the run earlier" in found.ignored[ignored] and ignored not in found.mapped


def test_steps_next_to_tokens_are_not_supported_where_the_batch_is_unknown() -> None:
    found = convert(f"{SIZES} --lr 1e-3 --data-path store --train-iters 9 --train-tokens 1e9".split(), nodes=1)
    assert found.parameters["max_tokens"] == 10**9 and "depends on the batch" in found.unsupported["train-iters"]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ("--train-iters 1000", {"warmup_steps": 10}),
        ("--train-samples 64000", {"warmup_steps": 10}),
        ("--train-samples 128000 --lr-decay-samples 64000", {"warmup_steps": 10}),
        ("--train-iters 1000 --lr-decay-iters 500", {"warmup_steps": 5}),
        ("--train-iters 1000 --lr-decay-iters 500 --lr-decay-style constant", {"warmup_steps": 5}),
        ("--train-samples 64000 --lr-decay-tokens 10000", {"warmup_steps": 10}),
        ("--train-tokens 10000", {"warmup_tokens": 100}),
    ],
)
def test_a_warmup_fraction_is_that_of_the_decay_or_of_the_run(lengths: str, expected: dict[str, int]) -> None:
    base = f"{SIZES} {BATCH} --lr-warmup-fraction 0.01 {lengths}"
    found = convert(base.replace("--train-iters 1000 --data", "--data").split(), nodes=1)
    schedule = found.parameters["schedule"]
    assert {key: value for key, value in schedule.items() if key.startswith("warmup")} == expected
    assert not {"lr-warmup-fraction", "lr-decay-iters"} & (found.ignored.keys() | found.unsupported.keys())


def test_a_warmup_fraction_of_an_unknown_length_is_not_supported() -> None:
    base = f"{SIZES} --lr 1e-3 --data-path store --lr-warmup-fraction 0.01"
    for length, needed in (("", "--train-iters"), ("--train-samples 640", "--train-samples and --global-batch-size")):
        found = convert(f"{base} {length}".split(), nodes=1)
        assert "warmup_steps" not in found.parameters["schedule"]
        assert found.unsupported["lr-warmup-fraction"].endswith(f"only with {needed}")


@pytest.mark.parametrize(
    ("style", "decay_type", "reported"),
    [
        ("", None, "exponential, Megatron's default without it: another kind of decay"),
        ("--lr-wsd-decay-style exponential", None, "exponential: another kind of decay"),
        ("--lr-wsd-decay-style minus_sqrt", "1-sqrt", None),
        ("--lr-wsd-decay-style cosine", "cosine", None),
    ],
)
def test_the_kind_of_a_wsd_decay_is_that_of_megatron_or_reported(
    style: str, decay_type: str | None, reported: str | None
) -> None:
    found = convert(f"{SIZES} {BATCH} --lr-decay-style WSD --lr-wsd-decay-iters 100 {style}".split(), nodes=1)
    assert found.parameters["schedule"].get("decay_type") == decay_type
    assert found.unsupported.get("lr-wsd-decay-style") == reported
    Parameters.from_dict(found.parameters, source="test")


def test_values_that_change_nothing_are_ignored() -> None:
    experts = "--num-experts 1 --moe-loss-coeff 0.01 --num-experts-teacher 1"
    same = f"--hidden-dropout 0 --kv-channels 16 --rotary-percent 1.0 {experts} --split '98,2,0'"
    given = f"{SIZES} {BATCH} {LLAMA} {same}"
    found = convert(given.split(), nodes=1)
    assert found.unsupported == {} and found.parameters["data"]["split"] == [98, 2, 0]
    assert {"kv-channels", "rotary-percent", "num-experts", "moe-loss-coeff"} <= found.ignored.keys()


def test_no_batches_of_validation_are_no_validation() -> None:
    found = convert(f"{SIZES} {BATCH} --eval-iters 0 --eval-interval 25".split(), nodes=1)
    assert "evaluation" not in found.parameters and found.parameters["data"]["split"] == [969, 30, 1]
    assert found.ignored["eval-iters"] == found.ignored["eval-interval"] == "validation is off: --eval-iters 0"
    Parameters.from_dict(found.parameters, source="test")


def test_what_megatron_does_without_an_option_is_not_lost() -> None:
    base = f"{SIZES} {BATCH}"
    llama = convert(f"{base} {LLAMA} --eval-interval 25".split(), nodes=1)
    assert llama.unsupported["hidden-dropout"].startswith("0.1, Megatron's default")
    assert llama.parameters["data"]["split"] == [969, 30, 1] and llama.parameters["evaluation"]["steps"] == 25
    assert any("without --split" in note for note in llama.notes)
    Parameters.from_dict(llama.parameters, source="test")
    assert "hidden-dropout" not in convert(base.split(), nodes=1).unsupported  # a GPT-2 has it
    whole = convert(f"{base} --split 1".split(), nodes=1)
    assert "split" not in whole.parameters["data"] and not any("without --split" in note for note in whole.notes)
    separate = convert([*base.replace("--data-path", "--train-data-path").split(), "--valid-data-path", "b"], nodes=1)
    assert "split" not in separate.parameters["data"]


def test_files_without_weights_give_a_note() -> None:
    base = f"{SIZES} --lr 1e-3 --train-iters 9 --global-batch-size 4 --data-path"
    for paths, has_note in (("a b", True), ("a", False), ("0.5 a 0.5 b", False)):
        notes = convert(f"{base} {paths}".split(), nodes=1).notes
        assert any("by size" in note for note in notes) == has_note, notes


def test_invalid_values_are_errors() -> None:
    with pytest.raises(UserError, match="--num-layers: expected a whole number, got many"):
        convert(["--num-layers", "many"], nodes=None)
    for text in ("inf", "nan", "1e999"):
        with pytest.raises(UserError, match=f"--num-layers: expected a whole number, got {text}"):
            convert(["--num-layers", text], nodes=None)
        with pytest.raises(UserError, match=r"--split: expected .*, got "):
            convert(["--num-layers", "2", "--split", f"{text},1"], nodes=None)
    with pytest.raises(UserError, match="--data-path: expected prefixes, or pairs of weight and prefix"):
        convert(["--num-layers", "2", "--data-path", "a", "0.5", "b"], nodes=None)


def test_the_program_is_found_with_any_launcher(tmp_path: Path) -> None:
    for start in ("python -u x/pretrain_gpt.py", "torchrun --nnodes=4 pretrain.py", "deepspeed --num_nodes 4 p.py"):
        _, options, nodes = find_command([["cd", "x"], [*start.split(), "--num-layers", "2"]], tmp_path)
        assert options == ["--num-layers", "2"] and nodes == (None if start.startswith("python") else 4)
    _, options, _ = find_command([["python", "-m", "megatron.pretrain", "--num-layers", "2"]], tmp_path)
    assert options == ["--num-layers", "2"]
    with pytest.raises(UserError, match="expected one command that starts a program with --num-layers, found 0"):
        find_command([["ls"]], tmp_path)
