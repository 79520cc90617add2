"""Writing a Transformers folder without messages of other libraries."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def write(model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Saves `model` into `folder`: config.json and safetensors weights, its own or those of the state dict `state`."""
    silence_logging()
    model.save_pretrained(folder, state_dict=state)


def silence_logging() -> None:
    """Disables the progress bars of Transformers, and DeepSpeed's warning on a machine without a GPU.

    Where DeepSpeed is installed, Transformers imports it when it saves and when it generates, to see whether a model is
    wrapped. That import warns unless the accelerator is set.
    """
    transformers_logging.disable_progress_bar()
    if importlib.util.find_spec("deepspeed") and not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
