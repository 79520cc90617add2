"""Weights that are computed and written one at a time, by Transformers' own way of saving a model.

A model's weights may be on the meta device, without memory. `save` has Transformers choose their names and files, and
writes each file itself, in the bytes of safetensors' own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils as transformers_models
from torch import Tensor
from transformers import PreTrainedModel

from terakoya.toolkit.attributes import replace_attribute

log = logging.getLogger("terakoya")

DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
"""The names of dtypes in safetensors, in its order: a file has its tensors from the last of them to the first."""
SAVE = "safe_save_file"
"""What Transformers calls to write a file."""


def save(
    model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None, value_of: Callable[[Tensor], Tensor]
) -> None:
    """Saves `model`, or the state dict `state` of it, into `folder`; `value_of` returns a tensor with its values. Where
    Transformers needs the values of all weights to save a model, it gets them."""

    def write(tensors: Mapping[str, Tensor], filename: str, metadata: dict[str, str] | None = None) -> None:
        write_file(tensors, Path(filename), metadata, value_of)

    try:
        with replace_attribute(transformers_models, SAVE, write):  # Transformers empties the state dict that it gets
            model.save_pretrained(folder, state_dict=None if state is None else dict(state))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever code raises that expects values
        log.info("%s is written from whole weights: %s: %s", folder, type(error).__name__, error)
        model.save_pretrained(folder, state_dict=_with_values(model.state_dict() if state is None else state, value_of))


def _with_values(state: Mapping[str, Tensor], value_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns the values of all tensors in `state`; those that are one stay one. Raises ValueError: one has none, which
    Transformers would leave out of a file that names it."""
    values: dict[Any, Tensor] = {}
    for name, value in state.items():
        if values.setdefault(_identity(value), value_of(value)).is_meta:
            raise ValueError(f"{name} has no values to write")
    return {name: values[_identity(value)] for name, value in state.items()}


def _identity(value: Tensor) -> Any:
    return value.untyped_storage()._cdata, value.shape, value.stride(), value.storage_offset()


def write_file(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None, value_of: Callable[[Tensor], Tensor]
) -> None:
    """Writes the safetensors file `path` with the values that `value_of` returns for each of `tensors`, of which only
    shapes and dtypes are read. Raises OSError."""
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    begin = 0
    for name in names:
        end = begin + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            wanted, value = tensors[name], value_of(tensors[name])
            assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), f"{name}: {value.dtype} {value.shape}"
            file.write(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
