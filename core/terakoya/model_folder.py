"""Writing a Transformers folder, without the noise that others make on the way."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def write(model: PreTrainedModel, folder: Path) -> None:
    """Saves `model` into `folder`: config.json and safetensors weights."""
    transformers_logging.disable_progress_bar()
    if importlib.util.find_spec("deepspeed"):
        # Transformers asks DeepSpeed, where it is installed, whether the model is wrapped; on a machine without a
        # GPU its first import would warn of that
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model.save_pretrained(folder)
