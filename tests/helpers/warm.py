"""What the fork server imports once, so that the processes that `toy` and `worlds` fork need not."""

from __future__ import annotations

import gc
import importlib
import pkgutil

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import terakoya_plugins
from terakoya.commands.main import command_line
from terakoya.toolkit.formats.model_folder import silence_logging

IMPORTED = (
    "rich.console",
    "rich._emoji_codes",
    "terakoya.config.language_pretraining_start",
    "terakoya.estimation.model_errors",
    "terakoya.estimation.model_check",
    "terakoya.training.dry_run",
    "terakoya.training.setup",
    "tokenizers",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "transformers.generation.utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.electra.modeling_electra",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gptj.modeling_gptj",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "typer._adapters",
    *(module.name for module in pkgutil.walk_packages(terakoya_plugins.__path__, "terakoya_plugins.")),
)

for name in IMPORTED:
    importlib.import_module(name)
silence_logging()  # imports DeepSpeed where it is installed, as the first save of a model does
get_checkpoint_conversion_mapping("bert")  # compiles a thousand patterns, and keeps them
command_line()
gc.collect()
gc.freeze()  # no collection in a forked process looks through what it shares, which would copy it
