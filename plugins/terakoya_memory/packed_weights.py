"""Frozen weights of 8 and 4 bits under adapters (QLoRA: Dettmers et al., 2023, arXiv:2305.14314), in bitsandbytes's
formats: `int8` with a scale for each output (LLM.int8()'s for weights), `nf4` with one for each 64 weights.

Layers multiply in the precision of the run, with weights that are unpacked for each product and freed after it; the
backward unpacks them again. What is trained, validated and exported is the model of the unpacked weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from terakoya.errors import UserError, import_extra
from terakoya.toolkit.attributes import replace_level
from terakoya.training.model.module_parts import top_level_models

KEY = "lora.quantization"
BLOCK = 64
"""Weights of `nf4` with one scale: bitsandbytes's default."""


def pack_frozen(module: nn.Module, kind: str) -> None:
    """Packs the frozen linear layers of every model in `module`, in place; embeddings and vocabulary heads stay, and so
    does what is trained whole.

    Raises:
        UserError: bitsandbytes is not installed, or a model has no such layers.
    """
    _bitsandbytes()
    for model in top_level_models(module):
        owners: dict[int, int] = {}
        for _, weight in model.named_parameters(remove_duplicate=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
        found = [(name, each) for name, each in model.named_modules() if _can_pack(model, name, each, owners)]
        if not found:
            raise UserError(
                f"{KEY}: {type(model).__name__} has no frozen linear layers besides its head; set it to null"
            )
        for name, layer in found:
            model.set_submodule(name, PackedLinear(layer, kind))


def _can_pack(model: PreTrainedModel, name: str, layer: nn.Module, owners: Mapping[int, int]) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or layer is model.get_output_embeddings():
        return False
    is_copied = any(f".{part}." in f".{name}." for part in ("original_module", "modules_to_save"))
    weight = layer.get_parameter("weight")
    return not (weight.requires_grad or is_copied or owners[id(weight)] > 1)


class PackedLinear(nn.Linear):
    """A frozen linear layer that keeps its weight packed, by outputs.

    Attributes:
        kind: "int8" or "nf4".
        transposed: whether `weight` is (I, O), as GPT-2's.
        packed_elements: elements of the weight, for counts.
        packed, scales: what the weight is unpacked from.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear | Conv1D, kind: str) -> None:
        """Packs the weight of `layer`, on the host: a GPU rounds otherwise."""
        nn.Module.__init__(self)
        self.kind, self.transposed, self.bias = kind, isinstance(layer, Conv1D), layer.bias
        weight, operations = layer.weight.detach().float().cpu(), torch.ops.bitsandbytes
        weight = weight.T.contiguous() if self.transposed else weight
        self.out_features, self.in_features = weight.shape
        self.packed_elements = weight.numel()
        if kind == "int8":
            packed, scales, _ = operations.int8_vectorwise_quant.default(weight, 0.0)
        else:
            packed, scales = operations.quantize_4bit.default(weight, BLOCK, kind, torch.uint8)
        self.register_buffer("packed", packed.to(layer.weight.device), persistent=False)
        self.register_buffer("scales", scales.to(layer.weight.device), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight, (O, I) or `transposed`, float32."""
        shape = (self.out_features, self.in_features)
        weight = _unpack(self.packed, self.scales, self.kind, shape, torch.float32)
        return weight.T if self.transposed else weight

    def forward(self, states: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        result: Tensor = _Product.apply(states, self.bias, self.packed, self.scales, self.kind, shape)
        return result


class _Product(torch.autograd.Function):
    """A product with a weight that autograd keeps packed."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, bias: Tensor | None, packed: Tensor, scales: Tensor, kind: str, shape: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.kind, ctx.shape, ctx.dtype = kind, shape, states.dtype
        weight = _unpack(packed, scales, kind, shape, states.dtype)
        return nn.functional.linear(states, weight, None if bias is None else bias.to(states.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        packed, scales = ctx.saved_tensors
        weight = _unpack(packed, scales, ctx.kind, ctx.shape, gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), None, None, None, None, None


def _unpack(packed: Tensor, scales: Tensor, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns the weight of this `shape` in `dtype`, rounded from float32."""
    operations = torch.ops.bitsandbytes
    if kind == "int8":
        return operations.int8_vectorwise_dequant.default(packed, scales).to(dtype)
    # as one row: on a CPU rows that are no multiple of a block would get the scales of others
    elements = (shape[0] * shape[1],)
    return (
        operations.dequantize_4bit.default(packed, scales, BLOCK, kind, elements, torch.float32).view(shape).to(dtype)
    )


def _bitsandbytes() -> Any:
    with replace_level("bitsandbytes", logging.ERROR):  # it asks for kernels that nothing here needs
        return import_extra("bitsandbytes", "memory", KEY)
