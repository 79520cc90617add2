"""Writing a Transformers folder, and keeping quiet who would make noise on the way."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def write(model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Saves `model` into `folder`: config.json and safetensors weights, its own or those of its state dict `state`."""
    silence_logging()
    model.save_pretrained(folder, state_dict=state)


def silence_logging() -> None:
    """Keeps Transformers from drawing bars, and DeepSpeed from warning of a machine without a GPU.

    Transformers asks DeepSpeed, where it is installed, whether a model is wrapped, when it saves and when it generates;
    its first import would warn, unless it is told.
    """
    transformers_logging.disable_progress_bar()
    if importlib.util.find_spec("deepspeed") and not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
