"""Checkpoints laid out by the published formats, weight by weight, from a Transformers model: what importers must read.

Written from the formats' descriptions alone, head by head, without the importers' or the exporter's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with every weight random, norms and biases too, so that none can hide behind another."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    return model.eval()


def gpt2(*, vocab_size: int = 150, activation: str = "gelu_new", tied: bool = True) -> GPT2LMHeadModel:
    """A small GPT-2."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=vocab_size, n_embd=32, n_layer=4, n_head=4, n_inner=48, n_positions=40,
        activation_function=activation, tie_word_embeddings=tied, **NO_TOKENS,
    )  # fmt: skip
    return perturbed(GPT2LMHeadModel(config))


def llama(*, vocab_size: int = 150, tied: bool = False, biases: bool = False) -> LlamaForCausalLM:
    """A small Llama with grouped queries, and heads that do not fill the hidden size."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=6, intermediate_size=48, max_position_embeddings=40, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        attention_bias=biases, mlp_bias=biases, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **NO_TOKENS,
    )  # fmt: skip
    return perturbed(LlamaForCausalLM(config))


def same(folder: Path, model: PreTrainedModel) -> None:
    """The folder loads offline as `model`'s class, has its weights to the bit and its logits."""
    loaded, told = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    theirs, ours = loaded.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert torch.equal(logits(loaded.eval()), logits(model))


def tokenizer(folder: Path) -> Path:
    """`folder` with a tokenizer of 150 pieces that plain Transformers loads."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 150)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(pieces, "<unk>")), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, tied": partial(llama, tied=True),
    "llama, biases": partial(llama, biases=True),
    "gpt2": gpt2,
    "gpt2, exact": partial(gpt2, activation="gelu"),
    "gpt2, untied": partial(gpt2, tied=False),
}


@cache
def model(name: str) -> PreTrainedModel:
    """The model of `MODELS` with this name, made once."""
    return MODELS[name]()


def logits(of: PreTrainedModel, vocabulary: int = 150) -> Tensor:
    """The model's logits (3, 17, V) of fixed ids."""
    ids = torch.randint(0, vocabulary, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return of(ids).logits


# ------------------------------------------------------------------------------------------------- DeepSpeed ZeRO


def zero(
    model: PreTrainedModel,
    root: Path,
    *,
    stage: int,
    processes: int,
    frozen: tuple[str, ...] = (),
    alignment: int | None = None,
) -> Path:
    """A ZeRO checkpoint of `model`, weights of a name in `frozen` not trained; returns `root`.

    Matrices are one group of the optimizer, vectors another, as with and without weight decay. In stages 1 and 2 each
    weight may be filled up to a multiple of `alignment` numbers; the fillings are no zeros here, so that they show.
    """
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    described = type(model.config)(**{**model.config.to_dict(), "architectures": [type(model).__name__]})
    described.save_pretrained(root)
    named = dict(model.named_parameters())
    trained = {name: value.detach() for name, value in named.items() if not name.startswith(frozen or ("none",))}
    shapes = [
        {name: value.shape for name, value in trained.items() if (value.ndim > 1) == matrices}
        for matrices in (True, False)
    ]
    kept = {name: value.detach() for name, value in named.items() if name not in trained}
    shared = {}
    if model.config.tie_word_embeddings:
        inputs = next(name for name, value in named.items() if value is model.get_input_embeddings().weight)
        shared = {"lm_head.weight": inputs}
    common = {
        "module": {name: value.bfloat16() for name, value in model.state_dict().items()},
        "buffer_names": [], "param_shapes": shapes, "shared_params": shared, "ds_version": "0.19.8",
        "frozen_param_shapes": {name: value.shape for name, value in kept.items()} or None,
    }  # fmt: skip
    vectors: list[list[list[Tensor]]] = [[[] for _ in shapes] for _ in range(processes)]
    fragments: list[dict[str, Tensor]] = [{} for _ in range(processes)]
    paddings: list[list[int]] = []
    for number, names in enumerate(shapes):
        if stage < 3:
            fillings = [-trained[name].numel() % (alignment or 1) for name in names]
            paddings.append(fillings)
            parts = zip(names, fillings, strict=True)
            flat = torch.cat([torch.cat([trained[each].flatten(), torch.full((more,), 7.0)]) for each, more in parts])
            even = -(-len(flat) // (2 * processes)) * 2 * processes
            flat = torch.cat([flat, torch.zeros(even - len(flat))])
            for rank, share in enumerate(flat.chunk(processes)):
                vectors[rank][number].append(share.clone())
            continue
        for name in names:
            for rank, share in enumerate(slices(trained[name], processes)):
                vectors[rank][number].append(share)
    for name, value in kept.items():
        shares = slices(value, processes) if stage == 3 else [value] * processes
        for rank, share in enumerate(shares):
            fragments[rank][name] = share
    for rank in range(processes):
        groups = [torch.cat(each) for each in vectors[rank]]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        count = processes if stage == 3 else [processes] * len(shapes)
        optimizer = {"zero_stage": stage, "partition_count": count, key: groups, "loss_scaler": None}
        if alignment is not None:
            optimizer["param_alignment_paddings"] = paddings
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if stage == 3 or rank == 0:
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            state = {**common, "frozen_param_fragments": fragments[rank] or None}
            torch.save(state, folder / f"{prefix}mp_rank_00_model_states.pt")
    (root / "latest").write_text("global_step7")
    return root


def slices(value: Tensor, processes: int) -> list[Tensor]:
    """`value`, flat, in slices of one length, the last filled up with zeros."""
    size = -(-value.numel() // processes)
    filled = torch.zeros(size * processes)
    filled[: value.numel()] = value.flatten()
    return [each.clone() for each in filled.chunk(processes)]
