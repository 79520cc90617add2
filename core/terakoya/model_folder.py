"""Writing a Transformers folder, without the noise that others make on the way."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def write(model: PreTrainedModel, folder: Path) -> None:
    """Saves `model` into `folder`: config.json and safetensors weights."""
    transformers_logging.disable_progress_bar()
    if importlib.util.find_spec("deepspeed") and not torch.cuda.is_available():
        # Transformers asks DeepSpeed, where it is installed, whether the model is wrapped; its first import on a
        # machine without a GPU would warn of that, unless it is told
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model.save_pretrained(folder)
