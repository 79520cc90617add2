"""Writing a Transformers folder without messages of other libraries, and files with errors that say what failed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from terakoya.atomic_files import os_error_of
from terakoya.toolkit.attributes import replace_variables
from terakoya.toolkit.formats import _streamed_weights

FORMER_NAMES_OF_TWO = {"gemma3_text": ("rope_theta", "rope_local_base_freq")}
"""What Transformers 4 calls the bases of rotary positions in whole and in local layers, by the type of models that have
two; ModernBERT's names where it is not here."""

VALUE_OF = "value_of_weight"
"""The attribute of a model with what computes its weights: `write` does it one at a time, for lack of memory."""


def write(model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Saves `model` into `folder`: config.json and safetensors weights, its own or those of the state dict `state`."""
    silence_logging()
    value_of = getattr(model, VALUE_OF, None)
    state = _with_former_bias(model, state, value_of or Tensor.detach)
    with safetensors_as_os_errors(folder):
        if value_of is None:
            model.save_pretrained(folder, state_dict=state)
        else:
            _streamed_weights.save(model, folder, state, value_of)
    _add_former_rotary_keys(folder / "config.json")


def _with_former_bias(
    model: PreTrainedModel, state: dict[str, Tensor] | None, value_of: Callable[[Tensor], Tensor]
) -> dict[str, Tensor] | None:
    """Returns what to save of `model`: for a head of RoBERTa's also its bias by the name that Transformers 4.45 reads,
    which otherwise takes 0 without a word. It is one tensor with two names, of which Transformers 5 saves the first."""
    head = getattr(model, "lm_head", None)
    if not hasattr(head, "decoder") or not hasattr(head, "bias"):
        return state
    own = model.state_dict() if state is None else state
    if "lm_head.bias" not in own:
        return state
    return {**own, "lm_head.decoder.bias": value_of(own["lm_head.bias"]).clone()}


def _add_former_rotary_keys(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    if former := former_rotary_keys(config):
        text = json.dumps({**config, **former}, indent=2, sort_keys=True, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


def former_rotary_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bases and scaling of rotary positions of a config under the names that Transformers 4 reads: it does
    not know `rope_parameters`, and would take its defaults without a word. Transformers 5 reads the same from both."""
    rotary = config.get("rope_parameters") or {}
    whole, local = FORMER_NAMES_OF_TWO.get(config.get("model_type", ""), ("global_rope_theta", "local_rope_theta"))
    named = {"rope_theta": rotary, whole: rotary.get("full_attention"), local: rotary.get("sliding_attention")}
    former = {name: each["rope_theta"] for name, each in named.items() if each and "rope_theta" in each}
    scaling = {key: value for key, value in rotary.get("full_attention", rotary).items() if key != "rope_theta"}
    if scaling.get("rope_type", "default") != "default":
        former["rope_scaling"] = scaling
    if config.get("model_type") == "olmo2" and scaling.get("rope_type") == "linear":
        former["rope_scaling"] = {"type": "linear", "factor": scaling["factor"]}  # Transformers 4 accepts no other keys
    return former


@contextmanager
def safetensors_as_os_errors(path: Path) -> Iterator[None]:
    """Raises an error of writing safetensors, such as a full disk, as the OSError that it is about."""
    try:
        yield
    except SafetensorError as error:
        raise os_error_of(error, path) or OSError(f"{path}: {error}") from error


def write_torch_file(content: Any, file: Path) -> None:
    """Writes `content` with `torch.save`. Raises the OSError of a write that fails, of which torch says only a part."""
    with file.open("wb", buffering=0) as handle:
        writer = _Writer(handle)
        try:
            torch.save(content, writer)  # type: ignore[arg-type] # it needs no more of a file
        except RuntimeError as error:
            raise writer.error or error from error


class _Writer:
    """A file that writes everything at once, and remembers the error of the last write that failed."""

    def __init__(self, handle: FileIO) -> None:
        self.handle = handle
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self.handle.write(rest) :]
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self.handle.name))
            raise self.error from error
        return len(data)

    def flush(self) -> None:
        """Nothing waits to be written."""


@contextmanager
def silence_transformers() -> Iterator[None]:
    """While open, Transformers neither logs nor shows progress bars: its loading info holds the same facts."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def silence_logging() -> None:
    """Disables the progress bars of Transformers, and DeepSpeed's warning on a machine without a GPU.

    Where DeepSpeed is installed, Transformers imports it when it saves and when it generates, to see whether a model is
    wrapped. That import warns unless the accelerator is set, so it is done here; no variable is left behind.
    """
    transformers_logging.disable_progress_bar()
    if "deepspeed" in sys.modules or not importlib.util.find_spec("deepspeed") or torch.cuda.is_available():
        return
    with replace_variables({"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}):
        importlib.import_module("deepspeed")
