"""What the fork server imports once, so that the processes that `toy` and `worlds` fork need not."""

from __future__ import annotations

import importlib
import pkgutil

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import terakoya_plugins
from terakoya.toolkit.formats.model_folder import silence_logging

IMPORTED = (
    "terakoya.commands.main",
    "terakoya.training.setup",
    "torch.utils.tensorboard",
    "transformers.models.bert",
    "transformers.models.electra",
    *(module.name for module in pkgutil.walk_packages(terakoya_plugins.__path__, "terakoya_plugins.")),
)

for name in IMPORTED:
    importlib.import_module(name)
silence_logging()  # imports DeepSpeed where it is installed, as the first save of a model does
get_checkpoint_conversion_mapping("bert")  # compiles a thousand patterns, and keeps them
