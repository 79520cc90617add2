"""Converts the options of pretrain_gpt.py to the parameter JSON of the same run, as in the table of `script_flags`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from terakoya.errors import UserError, nearest
from terakoya_megatron.converted_config import ConvertedConfig
from terakoya_megatron.script_flags import FLAGS
from terakoya_megatron.script_options import Options, parse_integer, parse_ranges, parse_shares
from terakoya_megatron.script_run import (
    convert_length,
    convert_parallel,
    convert_precision_and_memory,
    convert_saving,
    convert_start,
    convert_trackers,
)
from terakoya_megatron.shell_script import as_written

SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "inverse-square-root": "inverse_square_root",
    "WSD": "warmup_stable_decay",
}  # fmt: skip
DECAY_TYPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
"""--lr-wsd-decay-style -> schedule.decay_type."""
DEFAULT_SPLIT = [969, 30, 1]
"""What Megatron uses for --data-path without --split."""
THETAS = ("rotary-base", "rope-theta", "rotary-position-embeddings-theta")
NO_EXPERTS = ("0", "1")
"""The values of --num-experts with which a model is dense."""
Z_LOSS = 1e-4
"""The weight of `--use-z-loss` in llm-jp's Megatron-LM, from PaLM."""


def convert(words: Sequence[str], *, nodes: int | None) -> ConvertedConfig:
    """Converts a command to the parameter JSON.

    Args:
        words: the words after the program's name.
        nodes: number of nodes that the launcher starts; None if unknown.

    Raises:
        UserError: an option has an invalid value.
    """
    options = Options(words)
    notes: list[str] = []
    result: dict[str, Any] = {}
    result["data"] = convert_data(options, notes)
    result["architecture"] = convert_architecture(options, notes)
    result["objective"] = convert_objective(options)
    result["optimizer"] = convert_optimizer(options)
    batch = options.take("global-batch-size", parse_integer)
    result["schedule"] = convert_schedule(options, batch, result["data"].get("sequence_length"))
    if batch is None:
        notes.append("batch_size is missing: Megatron takes micro-batch-size times the number of data-parallel GPUs")
    elif nodes is not None and nodes > 1:
        rows = {str(node): batch // nodes + (node < batch % nodes) for node in range(nodes)}
        result["batch_size"] = rows
    else:
        result["batch_size"] = {"-1": batch}
        if nodes is None:
            notes.append('batch_size is for one node ("-1"); for several nodes, set the rows of each')
    result |= convert_length(options, batch, result["data"].get("sequence_length"))
    result |= convert_precision_and_memory(options)
    result["parallel"] = convert_parallel(options, result["architecture"].get("num_hidden_layers"))
    _remove_fp8_with_zero(options, result)
    result |= convert_saving(options, result["data"])
    result["start_from"] = convert_start(options, notes)
    result["trackers"] = convert_trackers(options) or None
    if result["objective"]["layout"] == "megatron" and batch and "max_steps" in result:
        if len(result["data"].get("train", ())) == 1:
            result["objective"]["samples"] = batch * result["max_steps"]
        else:
            notes.append(
                "with several stores, each epoch is shuffled separately; Megatron shuffles a store's epochs together"
            )
    architecture = result["architecture"]
    sizes = architecture.get("hidden_size"), architecture.get("num_attention_heads")
    _record_remaining(options, notes, head_size=sizes[0] // sizes[1] if all(sizes) else None)
    parameters = {key: value for key, value in result.items() if value not in (None, {})}
    return ConvertedConfig(parameters, options.mapped, options.ignored, options.unsupported, notes)


def _remove_fp8_with_zero(options: Options, result: dict[str, Any]) -> None:
    if result.get("precision") == "fp8" and result["parallel"].get("engine") == "deepspeed":
        result["precision"] = "bf16"
        for name in ("fp8-format", "fp8-hybrid"):
            if name in options:
                options.mark_unsupported(name, "8-bit products together with ZeRO; bf16 is used")


def _record_remaining(options: Options, notes: list[str], *, head_size: int | None) -> None:
    """Records, for each option that is not recorded yet, what the table says; `head_size` is that of most models."""
    dense = " ".join(options.given.get("num-experts", ())) in NO_EXPERTS
    for name, words in options.given.items():
        if name in options.mapped or name in options.ignored or name in options.unsupported:
            continue
        flag = FLAGS.get(name)
        value = as_written(" ".join(words))
        if name in ("expert-model-parallel-size", "rotary-percent") and value in ("1", "1.0"):
            options.ignored[name] = "1 changes nothing"
        elif name == "kv-channels" and value == str(head_size):
            options.ignored[name] = "the hidden size divided by the number of heads"
        elif dense and ("num-experts" in name or "moe" in name):
            options.ignored[name] = "no experts"
        elif flag is None:
            close = nearest(name, FLAGS)
            unknown = f"{value + ': ' if value else ''}unknown option"
            options.unsupported[name] = unknown + (close if "did you mean" in close else "")
        elif flag.outcome == "ignored":
            options.ignored[name] = flag.text
        elif flag.outcome == "unsupported":
            options.unsupported[name] = f"{value + ': ' if value else ''}{flag.text}"
        else:
            options.ignored[name] = "has no effect in this run"
    if "num-experts" in options.unsupported:
        notes.append("this run trains a mixture of experts; the parameters describe a dense model of the same sizes")


# ------------------------------------------------------------------------------------------------ parts of the JSON


def convert_architecture(options: Options, notes: list[str]) -> dict[str, Any]:
    """Converts to a Llama if positions are rotary, else to a GPT-2."""
    positions = options.take("position-embedding-type", str)
    rotary = options.take_switch("use-rotary-position-embeddings") or positions == "rope"
    is_llama = rotary
    if positions not in (None, "rope", "learned_absolute"):
        options.mark_unsupported("position-embedding-type", f"{positions}: another kind of positions")
    if not rotary and "no-position-embedding" in options:
        options.mark_unsupported("no-position-embedding", "a model without positions")
    converted: dict[str, Any] = {"type": "llama" if is_llama else "gpt2"}
    converted |= {
        "hidden_size": options.take("hidden-size", parse_integer),
        "num_hidden_layers": options.take("num-layers", parse_integer),
        "num_attention_heads": options.take("num-attention-heads", parse_integer),
        "max_position_embeddings": options.take("max-position-embeddings", parse_integer),
    }
    inner = "intermediate_size" if is_llama else "n_inner"
    converted[inner] = options.take("ffn-hidden-size", parse_integer, f"architecture.{inner}")
    if converted[inner] is None and is_llama and converted["hidden_size"]:
        converted[inner] = int(4 * converted["hidden_size"] * 2 / 3 / 64) * 64  # Megatron's default for gated layers
    epsilon = "rms_norm_eps" if is_llama else "layer_norm_epsilon"
    converted[epsilon] = 1e-5  # Megatron's default
    for name in ("norm-epsilon", "layernorm-epsilon"):
        converted[epsilon] = options.take(name, float, f"architecture.{epsilon}") or converted[epsilon]
    converted["initializer_range"] = options.take("init-method-std", float) or 0.02
    converted["tie_word_embeddings"] = not options.take_switch("untie-embeddings-and-output-weights")
    converted["scaled_init"] = True
    _check_layers(options, is_llama=is_llama, notes=notes)
    _convert_heads_and_dropout(options, converted, is_llama=is_llama)
    return {key: value for key, value in converted.items() if value is not None}


def _check_layers(options: Options, *, is_llama: bool, notes: list[str]) -> None:
    """Checks that norms, activation and biases are those of the architecture."""
    normalization = options.take("normalization", str) or "LayerNorm"
    gated = options.take_switch("swiglu")
    no_biases = options.take_switch("disable-bias-linear")
    for name, matches, reason in (
        ("normalization", (normalization.lower() == "rmsnorm") == is_llama, f"{normalization} with these positions"),
        ("swiglu", gated == is_llama, "SwiGLU without rotary positions"),
        ("disable-bias-linear", no_biases == is_llama, "linear layers without biases, in a model that has them"),
    ):
        if not matches and name in options:
            options.mark_unsupported(name, reason)
        elif not matches:
            notes.append(
                f"without --{name}, Megatron's model differs from a {'Llama' if is_llama else 'GPT-2'}: {reason}"
            )


def _convert_heads_and_dropout(options: Options, converted: dict[str, Any], *, is_llama: bool) -> None:
    """Adds the settings that only a Llama or only a GPT-2 has: key heads, dropout, positions, activation."""
    dropout = "attention_dropout" if is_llama else "attn_pdrop"
    converted[dropout] = options.take("attention-dropout", float, f"architecture.{dropout}", default=0.1)
    hidden = options.take("hidden-dropout", float)
    if is_llama:
        converted["num_key_value_heads"] = _key_heads(options)
        if hidden:
            options.mark_unsupported("hidden-dropout", f"{hidden}: a Llama has no dropout after its layers")
        elif hidden is not None:
            options.mark_ignored("hidden-dropout", "a Llama has no such dropout")
        elif "hidden-dropout" not in options:
            options.mark_unsupported(
                "hidden-dropout", "0.1, Megatron's default without it: a Llama has no dropout after its layers"
            )
        theta = [options.take(name, float) for name in THETAS]
        converted["rope_theta"] = next((value for value in theta if value is not None), 10000.0)
        return
    for name in ("num-query-groups", "num-key-value-heads", "group-query-attention"):
        if name in options:
            options.mark_unsupported(name, "a GPT-2 has as many key heads as query heads")
    converted["resid_pdrop"] = converted["embd_pdrop"] = 0.1 if hidden is None else hidden
    exact = options.take_switch("no-bias-gelu-fusion")
    options.take_switch("bias-gelu-fusion")
    tanh = options.take_switch("openai-gelu")
    converted["activation_function"] = "gelu" if exact and not tanh else "gelu_new"


def _key_heads(options: Options) -> int | None:
    """Number of key and value heads. Megatron-LM uses the number of groups only with --group-query-attention."""
    heads = options.take("num-key-value-heads", parse_integer)
    groups = options.take("num-query-groups", parse_integer)
    if options.take_switch("group-query-attention"):
        return groups or 1
    if "num-query-groups" in options:
        options.mark_ignored("num-query-groups", "without --group-query-attention it has no effect")
    return None if heads is None else int(heads)


def convert_data(options: Options, notes: list[str]) -> dict[str, Any]:
    """Converts stores with their weights, validation, and the length of rows."""
    converted: dict[str, Any] = {"sequence_length": options.take("seq-length", parse_integer)}
    for name in ("data-path", "train-data-path"):
        words = options.take(name, str.split, allow_unknown=True)
        if words:
            converted["train"] = parse_stores(words, name)
    validation = options.take("valid-data-path", str.split, allow_unknown=True)
    if validation:
        converted["validation"] = [each["store"] for each in parse_stores(validation, "valid-data-path")]
    split = options.take("split", parse_shares)
    if "data-path" in options and "split" not in options and not validation:
        converted["split"] = DEFAULT_SPLIT
        notes.append("data.split: without --split, Megatron takes 3 % of the data for validation and 0.1 % for tests")
    elif split and not validation:
        if split[0] and len(split) > 1 and any(split[1:]):
            converted["split"] = split
        else:
            options.mark_ignored("split", "all data is training data")
    elif split:
        options.mark_unsupported("split", "data.validation names separate stores")
    skipped = options.take("skip-train-iteration-range", parse_ranges)
    converted["skip_steps"] = skipped or None
    if len(converted.get("train", ())) > 1 and all("weight" not in store for store in converted["train"]):
        notes.append(
            "data.train: without weights, Megatron samples from its files by size, but here all stores count the same; "
            "set the weight of each store to its tokens (`terakoya store count`)"
        )
    if "train" in converted:
        notes.append(
            "data.train names Megatron's files: convert them with `terakoya store import PREFIX --tokenizer DIR "
            "--out STORE`, and name the stores"
        )
    return {key: value for key, value in converted.items() if value is not None}


def parse_stores(words: Sequence[str], name: str) -> list[dict[str, Any]]:
    """Returns the stores in `words`: prefixes, or pairs of weight and prefix. Raises UserError for a mix of both."""
    is_number = [bool(re.fullmatch(r"[\d.]+(e-?\d+)?", word)) for word in words]
    if not any(is_number):
        return [{"store": word} for word in words]
    if len(words) % 2 or is_number != [True, False] * (len(words) // 2):
        raise UserError(f"--{name}: expected prefixes, or pairs of weight and prefix, got {' '.join(words[:6])}")
    return [{"store": store, "weight": float(weight)} for weight, store in zip(words[::2], words[1::2], strict=True)]


def convert_objective(options: Options) -> dict[str, Any]:
    """Converts to causal language modelling, with Megatron's order of rows or with separated documents."""
    separated = [options.take_switch(name) for name in ("reset-position-ids", "reset-attention-mask")]
    converted: dict[str, Any] = {"type": "causal_lm", "layout": "packed" if any(separated) else "megatron"}
    if options.take_switch("eod-mask-loss"):
        if any(separated):
            options.mark_ignored("eod-mask-loss", "documents are separated: nothing follows an end of document")
        else:
            converted["eod_mask_loss"] = True
    if options.take_switch("use-z-loss"):
        converted["z_loss"] = Z_LOSS
    return converted


def convert_optimizer(options: Options) -> dict[str, Any]:
    """Converts to AdamW, which Megatron calls adam."""
    kind = options.take("optimizer", str)
    if kind not in (None, "adam"):
        options.mark_unsupported("optimizer", f"{kind}: another optimizer; adamw is used")
    return {
        "type": "adamw",
        "learning_rate": options.take("lr", float),
        "betas": [options.take(f"adam-beta{n}", float, default=each) for n, each in ((1, 0.9), (2, 0.999))],
        "eps": options.take("adam-eps", float) or 1e-8,
        "weight_decay": options.take("weight-decay", float, default=0.01),
    }


def convert_schedule(options: Options, batch: int | None, row: int | None) -> dict[str, Any]:
    """Converts the learning rate schedule. The global batch size converts samples to steps."""
    style = options.take("lr-decay-style", str) or "linear"
    if style not in SCHEDULES:
        options.mark_unsupported("lr-decay-style", f"{style}: another kind of schedule; cosine is used")
    converted: dict[str, Any] = {"type": SCHEDULES.get(style, "cosine")}
    decays = converted["type"] not in ("constant", "inverse_square_root")
    for name, key in (("lr-decay", "lr_decay"), ("lr-warmup", "warmup")):
        if name == "lr-decay" and not decays:
            continue
        steps = options.take(f"{name}-iters", parse_integer)
        samples = options.take(f"{name}-samples", parse_integer)
        tokens = options.take(f"{name}-tokens", parse_integer)
        if samples and batch:
            steps = -(-samples // batch)
        elif samples:
            options.mark_unsupported(
                f"{name}-samples", f"{samples}: can be converted to steps only with --global-batch-size"
            )
        if tokens:
            converted[f"{key}_tokens"] = tokens
        elif steps:
            converted[f"{key}_steps"] = steps
    share = options.take("lr-warmup-fraction", float)
    if share:
        converted |= _convert_warmup_fraction(options, share, batch)
    floor = options.take("min-lr", float)
    if floor and converted["type"] != "constant":
        converted["min_lr"] = floor
    if converted["type"] == "warmup_stable_decay":
        converted["decay_steps"] = options.take("lr-wsd-decay-iters", parse_integer)
        kind = options.take("lr-wsd-decay-style", str)
        converted["decay_type"] = DECAY_TYPES.get(kind)
        if "lr-wsd-decay-style" not in options:
            options.mark_unsupported(
                "lr-wsd-decay-style", "exponential, Megatron's default without it: another kind of decay"
            )
        elif kind is not None and kind not in DECAY_TYPES:
            options.mark_unsupported("lr-wsd-decay-style", f"{kind}: another kind of decay")
    return {key: value for key, value in converted.items() if value is not None}


LENGTHS = ("lr-decay-iters", "lr-decay-samples", "train-iters", "train-samples", "lr-decay-tokens", "train-tokens")
"""The lengths of which --lr-warmup-fraction may be a fraction; the first one that is given counts. Megatron-DeepSpeed
counts the warm-up in steps or samples even where the learning rate decays in tokens."""


def _convert_warmup_fraction(options: Options, share: float, batch: int | None) -> dict[str, int]:
    """Converts a warm-up of `share` of the decay or, without a length of the decay, of the run."""
    name = next((name for name in LENGTHS if name in options), "train-iters")
    length = None
    if name not in options.unsupported:
        length = options.take(name, parse_integer, options.mapped.get(name, "schedule.warmup_steps"))
    in_samples = name.endswith("samples")
    if length and in_samples:
        length = length / batch if batch else None
    if not length:
        needed = f"--{name} and --global-batch-size" if in_samples else f"--{name}"
        options.mark_unsupported("lr-warmup-fraction", f"{share}: can be converted to steps only with {needed}")
        return {}
    return {"warmup_tokens" if name.endswith("tokens") else "warmup_steps": round(share * length)}
