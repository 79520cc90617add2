"""The weights of a Transformers folder as deferred tensors: each is read from its file when its value is asked for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from terakoya.toolkit.deferred_tensors import CannotDeferError, DeferredTensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Transformers' names of a folder's weights: one file, or the list of several."""
SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
"""The variable at which Transformers handles weights in the thread that loads a model, where tensors are deferred."""


def deferred_weights(folder: Path, deferred: DeferredTensors) -> dict[str, Tensor]:
    """Returns name -> weight of the Transformers `folder`, none of which is read yet.

    Raises:
        CannotDeferError: the weights are not in safetensors files of Transformers' names.
        OSError, SafetensorError: a file is missing or damaged.
    """
    if (folder / WEIGHTS).is_file():
        names = {WEIGHTS}
    elif (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    else:
        raise CannotDeferError(f"{folder} has no {WEIGHTS}, whose tensors can be read one at a time")
    found = {}
    for path in sorted(folder / name for name in names):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                shape = file.get_slice(key).get_shape()
                dtype = (file.get_slice(key)[:0] if shape else file.get_tensor(key)).dtype
                found[key] = deferred.read_later(tuple(shape), dtype, partial(_read, path, key))
    return found


def _read(path: Path, key: str) -> Tensor:
    with safe_open(path, "pt") as file:
        value: Tensor = file.get_tensor(key)
        return value.clone()  # the file is mapped into memory, and changes nothing of what was read
