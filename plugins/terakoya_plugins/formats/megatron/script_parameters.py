"""From the options of a pretrain_gpt.py to the parameter JSON of the same run, as `_megatron_flags` has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from terakoya.components import ForeignParameters
from terakoya.errors import UserError, nearest
from terakoya_plugins.formats.megatron.script_flags import FLAGS
from terakoya_plugins.formats.megatron.script_options import Options, ranges, shares, whole
from terakoya_plugins.formats.megatron.script_run import length, numbers_and_memory, processes, saving, start, trackers
from terakoya_plugins.formats.megatron.shell_script import shown

SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "inverse-square-root": "inverse_square_root",
    "WSD": "warmup_stable_decay",
}  # fmt: skip
Z_LOSS = 1e-4
"""The weight that `--use-z-loss` means in llm-jp's Megatron-LM; PaLM's."""

NOTHING_IF_1 = ("context-parallel-size", "expert-model-parallel-size")


def convert(words: Sequence[str], *, nodes: int | None) -> ForeignParameters:
    """What `words`, the options behind the program's name, ask for. `nodes` is what the launcher was told, if at all.

    Raises:
        UserError: an option's value that is none.
    """
    options = Options(words)
    notes: list[str] = []
    result: dict[str, Any] = {}
    result["data"] = data(options, notes)
    result["architecture"] = architecture(options, notes)
    result["objective"] = objective(options)
    result["optimizer"] = optimizer(options)
    batch = options.take("global-batch-size", whole, "batch_size")
    result["schedule"] = schedule(options, batch, result["data"].get("sequence_length"))
    if batch is None:
        notes.append("batch_size is missing: Megatron takes micro-batch-size times the number of data-parallel GPUs")
    elif nodes is not None and nodes > 1:
        rows = {str(node): batch // nodes + (node < batch % nodes) for node in range(nodes)}
        result["batch_size"] = rows
    else:
        result["batch_size"] = {"-1": batch}
        if nodes is None:
            notes.append('batch_size is for one node ("-1"); for several give each its rows')
    result |= length(options, batch, result["data"].get("sequence_length"))
    result |= numbers_and_memory(options)
    result["parallel"] = processes(options, result["architecture"].get("num_hidden_layers"))
    _without_fp8(options, result)
    result |= saving(options, result["data"])
    result["start_from"] = start(options, notes)
    result["trackers"] = trackers(options) or None
    if result["objective"]["layout"] == "megatron" and batch and "max_steps" in result:
        if len(result["data"].get("train", ())) == 1:
            result["objective"]["samples"] = batch * result["max_steps"]
        else:
            notes.append(
                "of several stores each epoch is shuffled by itself; Megatron shuffles a store's epochs together"
            )
    _rest(options, notes)
    parameters = {key: value for key, value in result.items() if value not in (None, {})}
    return ForeignParameters(parameters, options.became, options.dropped, options.unplaced, notes)


def _without_fp8(options: Options, result: dict[str, Any]) -> None:
    """Takes fp8 back where ZeRO was asked for too."""
    if result.get("precision") == "fp8" and result["parallel"].get("engine") == "deepspeed":
        result["precision"] = "bf16"
        for name in ("fp8-format", "fp8-hybrid"):
            if name in options:
                options.no_place(name, "8-bit products together with ZeRO; bf16 is written")


def _rest(options: Options, notes: list[str]) -> None:
    """Says of each option that nothing was made of yet what the table says of it."""
    for name, words in options.given.items():
        if name in options.became or name in options.dropped or name in options.unplaced:
            continue
        flag = FLAGS.get(name)
        value = shown(" ".join(words))
        if name in NOTHING_IF_1 and value == "1":
            options.dropped[name] = "1 is nothing"
        elif name == "num-experts" and value in ("0", "1"):
            options.dropped[name] = "no experts"
        elif flag is None:
            close = nearest(name, FLAGS)
            known = f"{value + ': ' if value else ''}not known"
            options.unplaced[name] = known + (close if "did you mean" in close else "")
        elif flag.fate == "dropped":
            options.dropped[name] = flag.text
        elif flag.fate == "unplaced":
            options.unplaced[name] = f"{value + ': ' if value else ''}{flag.text}"
        else:
            options.dropped[name] = "says what holds without it"
    if "num-experts" in options.unplaced:
        notes.append("this run trains a mixture of experts; what is written here is a dense model of the same sizes")


# ------------------------------------------------------------------------------------------------ parts of the JSON


def architecture(options: Options, notes: list[str]) -> dict[str, Any]:
    """A Llama where positions are rotary, else a GPT-2."""
    positions = options.take("position-embedding-type", str, "architecture.type")
    rotary = options.switch("use-rotary-position-embeddings", "architecture.type") or positions == "rope"
    is_llama = rotary
    if positions not in (None, "rope", "learned_absolute"):
        options.no_place("position-embedding-type", f"{positions}: positions of another kind")
    if not rotary and "no-position-embedding" in options:
        options.no_place("no-position-embedding", "a model without positions")
    found: dict[str, Any] = {"type": "llama" if is_llama else "gpt2"}
    found |= {
        "hidden_size": options.take("hidden-size", whole, "architecture.hidden_size"),
        "num_hidden_layers": options.take("num-layers", whole, "architecture.num_hidden_layers"),
        "num_attention_heads": options.take("num-attention-heads", whole, "architecture.num_attention_heads"),
        "max_position_embeddings": options.take(
            "max-position-embeddings", whole, "architecture.max_position_embeddings"
        ),
    }
    inner = "intermediate_size" if is_llama else "n_inner"
    found[inner] = options.take("ffn-hidden-size", whole, f"architecture.{inner}")
    if found[inner] is None and is_llama and found["hidden_size"]:
        found[inner] = int(4 * found["hidden_size"] * 2 / 3 / 64) * 64  # what Megatron takes where it is gated
    epsilon = "rms_norm_eps" if is_llama else "layer_norm_epsilon"
    found[epsilon] = 1e-5  # Megatron's default
    for name in ("norm-epsilon", "layernorm-epsilon"):
        found[epsilon] = options.take(name, float, f"architecture.{epsilon}") or found[epsilon]
    found["initializer_range"] = options.take("init-method-std", float, "architecture.initializer_range") or 0.02
    found["tie_word_embeddings"] = not options.switch(
        "untie-embeddings-and-output-weights", "architecture.tie_word_embeddings"
    )
    found["scaled_init"] = True
    _kind_of_layers(options, is_llama=is_llama, notes=notes)
    _heads_and_dropout(options, found, is_llama=is_llama)
    return {key: value for key, value in found.items() if value is not None}


def _kind_of_layers(options: Options, *, is_llama: bool, notes: list[str]) -> None:
    """Norms, activation and biases: what the architecture has anyway, and what it has not."""
    normalization = options.take("normalization", str, "architecture.type") or "LayerNorm"
    gated = options.switch("swiglu", "architecture.type")
    bare = options.switch("disable-bias-linear", "architecture.type")
    for name, same, reason in (
        ("normalization", (normalization.lower() == "rmsnorm") == is_llama, f"{normalization} with these positions"),
        ("swiglu", gated == is_llama, "SwiGLU without rotary positions"),
        ("disable-bias-linear", bare == is_llama, "linear layers without biases, in a model that has them"),
    ):
        if not same and name in options:
            options.no_place(name, reason)
        elif not same:
            notes.append(f"without --{name} the old model differs from a {'Llama' if is_llama else 'GPT-2'}: {reason}")


def _heads_and_dropout(options: Options, found: dict[str, Any], *, is_llama: bool) -> None:
    """What Llama alone has, what GPT-2 alone has."""
    attention = options.take(
        "attention-dropout", float, "architecture.attention_dropout" if is_llama else "architecture.attn_pdrop"
    )
    hidden = options.take("hidden-dropout", float, "architecture.resid_pdrop")
    if is_llama:
        found["num_key_value_heads"] = _key_heads(options)
        found["attention_dropout"] = 0.1 if attention is None else attention
        if hidden:
            options.no_place("hidden-dropout", f"{hidden}: a Llama has no dropout behind its layers")
        elif hidden is not None:
            options.nothing_lost("hidden-dropout", "a Llama has none")
        theta = [options.take(name, float, "architecture.rope_theta") for name in ("rotary-base", "rope-theta")]
        found["rope_theta"] = next((each for each in theta if each is not None), 10000.0)
        return
    for name in ("num-query-groups", "num-key-value-heads", "group-query-attention"):
        if name in options:
            options.no_place(name, "a GPT-2 has as many heads of keys as of queries")
    found["attn_pdrop"] = 0.1 if attention is None else attention
    found["resid_pdrop"] = found["embd_pdrop"] = 0.1 if hidden is None else hidden
    exact = options.switch("no-bias-gelu-fusion", "architecture.activation_function")
    options.switch("bias-gelu-fusion", "architecture.activation_function")
    tanh = options.switch("openai-gelu", "architecture.activation_function")
    found["activation_function"] = "gelu" if exact and not tanh else "gelu_new"


def _key_heads(options: Options) -> int | None:
    """Heads of keys and values; Megatron-LM looks at its number of groups only where it is told to group."""
    key = "architecture.num_key_value_heads"
    heads = options.take("num-key-value-heads", whole, key)
    groups = options.take("num-query-groups", whole, key)
    if options.switch("group-query-attention", key):
        return groups or 1
    if "num-query-groups" in options:
        options.nothing_lost("num-query-groups", "without --group-query-attention nobody looks at it")
    return None if heads is None else int(heads)


def data(options: Options, notes: list[str]) -> dict[str, Any]:
    """Stores with their weights, validation, length of rows."""
    found: dict[str, Any] = {"sequence_length": options.take("seq-length", whole, "data.sequence_length")}
    for name in ("data-path", "train-data-path"):
        words = options.take(name, str.split, "data.train", as_written=True)
        if words:
            found["train"] = stores(words, name)
    validation = options.take("valid-data-path", str.split, "data.validation", as_written=True)
    if validation:
        found["validation"] = [each["store"] for each in stores(validation, "valid-data-path")]
    split = options.take("split", shares, "data.split")
    if split and not validation:
        if split[0] and len(split) > 1 and any(split[1:]):
            found["split"] = split
        else:
            options.nothing_lost("split", "everything is trained on")
    elif split:
        options.no_place("split", "data.validation names stores of their own")
    skipped = options.take("skip-train-iteration-range", ranges, "data.skip_steps")
    found["skip_steps"] = skipped or None
    if len(found.get("train", ())) > 1 and all("weight" not in store for store in found["train"]):
        notes.append(
            "data.train: without weights Megatron draws from each of its files by size; here each counts the same: "
            "give each its tokens as weight (`terakoya store count`)"
        )
    if "train" in found:
        notes.append(
            "data.train names Megatron's files: make stores of them with `terakoya store import PREFIX --tokenizer DIR "
            "--out STORE`, and name those"
        )
    return {key: value for key, value in found.items() if value is not None}


def stores(words: Sequence[str], name: str) -> list[dict[str, Any]]:
    """The prefixes in `words`, each behind its weight or all without. UserError for a mixture."""
    numbers = [bool(re.fullmatch(r"[\d.]+(e-?\d+)?", word)) for word in words]
    if not any(numbers):
        return [{"store": word} for word in words]
    if len(words) % 2 or numbers != [True, False] * (len(words) // 2):
        raise UserError(f"--{name}: expected prefixes, or pairs of weight and prefix, got {' '.join(words[:6])}")
    return [{"store": store, "weight": float(weight)} for weight, store in zip(words[::2], words[1::2], strict=True)]


def objective(options: Options) -> dict[str, Any]:
    """Causal language modelling; Megatron's own order of rows, or documents kept apart."""
    apart = [options.switch(name, "objective.layout") for name in ("reset-position-ids", "reset-attention-mask")]
    found: dict[str, Any] = {"type": "causal_lm", "layout": "packed" if any(apart) else "megatron"}
    if options.switch("eod-mask-loss", "objective.eod_mask_loss"):
        if any(apart):
            options.nothing_lost("eod-mask-loss", "documents are kept apart: nothing follows an end")
        else:
            found["eod_mask_loss"] = True
    if options.switch("use-z-loss", "objective.z_loss"):
        found["z_loss"] = Z_LOSS
    return found


def optimizer(options: Options) -> dict[str, Any]:
    """AdamW, which Megatron calls adam."""
    kind = options.take("optimizer", str, "optimizer.type")
    if kind not in (None, "adam"):
        options.no_place("optimizer", f"{kind}: another optimizer; adamw is written")
    betas = [options.take(f"adam-beta{number}", float, "optimizer.betas") for number in (1, 2)]
    return {
        "type": "adamw",
        "learning_rate": options.take("lr", float, "optimizer.learning_rate"),
        "betas": [0.9 if betas[0] is None else betas[0], 0.999 if betas[1] is None else betas[1]],
        "eps": options.take("adam-eps", float, "optimizer.eps") or 1e-8,
        "weight_decay": _or(options.take("weight-decay", float, "optimizer.weight_decay"), 0.01),
    }


def schedule(options: Options, batch: int | None, row: int | None) -> dict[str, Any]:
    """The learning rate's course. Samples become steps by the global batch."""
    style = options.take("lr-decay-style", str, "schedule.type") or "linear"
    if style not in SCHEDULES:
        options.no_place("lr-decay-style", f"{style}: a course of another kind; cosine is written")
    found: dict[str, Any] = {"type": SCHEDULES.get(style, "cosine")}
    decays = found["type"] not in ("constant", "inverse_square_root")
    for name, key in (("lr-decay", "lr_decay"), ("lr-warmup", "warmup")):
        if name == "lr-decay" and not decays:
            continue
        steps = options.take(f"{name}-iters", whole, f"schedule.{key}_steps")
        samples = options.take(f"{name}-samples", whole, f"schedule.{key}_steps")
        tokens = options.take(f"{name}-tokens", whole, f"schedule.{key}_tokens")
        if samples and batch:
            steps = -(-samples // batch)
        elif samples:
            options.no_place(f"{name}-samples", f"{samples}: a number of steps only with --global-batch-size")
        if tokens:
            found[f"{key}_tokens"] = tokens
        elif steps:
            found[f"{key}_steps"] = steps
    share = options.take("lr-warmup-fraction", float, "schedule.warmup_steps")
    if share:
        steps = found.get("lr_decay_steps") or int((options.given.get("train-iters") or ["0"])[0])
        found["warmup_steps"] = int(share * steps)
    floor = options.take("min-lr", float, "schedule.min_lr")
    if floor and found["type"] != "constant":
        found["min_lr"] = floor
    if found["type"] == "warmup_stable_decay":
        found["decay_steps"] = options.take("lr-wsd-decay-iters", whole, "schedule.decay_steps")
        kind = options.take("lr-wsd-decay-style", str, "schedule.decay_type")
        found["decay_type"] = {"exponential": None, "minus_sqrt": None}.get(kind, kind) if kind else None
        if kind and found["decay_type"] is None:
            options.no_place("lr-wsd-decay-style", f"{kind}: a decay of another kind")
    return {key: value for key, value in found.items() if value is not None}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
