"""What Transformers' causal models have in common: a body that ends with its norm, and a linear vocabulary head.

Letters in shapes: B rows, T positions, H hidden size, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from terakoya.components import TensorPartition
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import attention


def special_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """The keyword arguments of a config that name special ids.

    A padding id that ends documents too is left out: models keep the embedding of the padding id at zero.
    """
    pad = None if vocabulary.pad == vocabulary.end else vocabulary.pad
    return {"pad_token_id": pad, "bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.end}


def hidden(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The body's last hidden states (B, T, H), its final norm included: each position sees its own document up to
    itself."""
    return _run(model, batch, attention.causal_arguments(model, batch))


def hidden_by_mask(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`hidden` of a model that attends in its own way and adds a mask (B, 1, T, T) to its scores."""
    mask = attention.additive(attention.causal_mask(batch["document_ids"]))
    return _run(model, batch, {"attention_mask": mask})


def _run(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> torch.Tensor:
    """Words are looked up here: given ids, some bodies would search them for padding, and wait for the device. Of a
    batch that holds `inputs_embeds` (B, T, H) these are taken."""
    body = model.base_model
    words = batch["inputs_embeds"] if "inputs_embeds" in batch else body.get_input_embeddings()(batch["input_ids"])
    found = body(inputs_embeds=words, position_ids=batch["position_ids"], use_cache=False, **arguments)
    return found.last_hidden_state


def keep_blocks(
    model: PreTrainedModel, kept: range, *, blocks: str, norm: str, before: Mapping[str, torch.nn.Module]
) -> None:
    """`Architecture.cut` for a body that has its blocks under the name `blocks` and its final norm under `norm`.

    Args:
        before: what the body runs between words and blocks, by name, with what stands there where that is taken out.
    """
    body = model.base_model
    every = getattr(body, blocks)
    setattr(body, blocks, every[kept.start : kept.stop])
    if kept.start > 0:
        body.set_input_embeddings(torch.nn.Identity())
        for name, stand_in in before.items():
            setattr(body, name, stand_in)
    if kept.stop < len(every):
        setattr(body, norm, torch.nn.Identity())
        model.set_output_embeddings(torch.nn.Identity())


class NoPositions(torch.nn.Module):
    """Stands where a body adds an embedding of positions, and adds nothing."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Zero, () float32, whatever the positions (B, T)."""
        return torch.zeros((), device=position_ids.device)


def scale_output_layers(model: PreTrainedModel, *names: str, layers: int, down: bool = True) -> None:
    """Divides the weights with a name that ends in one of `names` by sqrt(2 L); multiplies instead if not `down`.

    These are the layers that add to the residual stream, 2 of each of L = `layers` blocks: drawn with a standard
    deviation that is smaller by that, the stream does not grow with depth (GPT-2, Radford et al., 2019; Megatron-LM).
    """
    factor = math.sqrt(2 * layers)
    found = [
        weight for name, weight in model.named_parameters() if name.endswith(tuple(f".{each}.weight" for each in names))
    ]
    assert len(found) == 2 * layers, f"expected {2 * layers} output layers, found {len(found)}"
    with torch.no_grad():
        for weight in found:
            weight.mul_(1 / factor if down else factor)


def gated_partition(
    heads: int, key_value_heads: int | None, intermediate_size: int, *, on_parts: Sequence[str] = ()
) -> TensorPartition:
    """How processes share the blocks of models in Llama's shape: heads of queries with those of keys and values that
    they share, and both halves of the gated feed-forward.

    Args:
        on_parts: modules that every process has whole and applies to its own heads alone.
    """
    return TensorPartition(
        sizes={
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads or heads,
            "intermediate_size": intermediate_size,
        },
        entries=("self_attn", "mlp"),
        columns={
            **{f"self_attn.{name}_proj": 1 for name in ("q", "k", "v")},
            **{f"mlp.{name}_proj": 1 for name in ("gate", "up")},
        },
        rows=("self_attn.o_proj", "mlp.down_proj"),
        on_parts=on_parts,
    )


def fuse_gelu(model: PreTrainedModel) -> None:
    """Lets one kernel compute each "gelu_new" in `model`, which Transformers writes out in eight operations.

    The same formula, other only in its rounding: half the time and none of the arrays in between. The config says what
    it said, so a saved model is Transformers' own.
    """
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, torch.nn.GELU(approximate="tanh"))
