"""What the fork server imports once, so that the processes that `toy` and `worlds` fork need not."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
from pathlib import Path

import frozen
import small_store
import toy
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import terakoya_plugins
from terakoya.checking.model_errors import check_model
from terakoya.commands.main import command_line
from terakoya.config.parameters import Parameters
from terakoya.plugins import loading
from terakoya.toolkit.formats.model_folder import silence_logging

IMPORTED = (
    "rich.console",
    "rich.table",
    "rich._emoji_codes",
    "terakoya_language_pretraining.entries",
    "terakoya_launch.plan",
    "terakoya.plugins.create",
    "terakoya_planning.dry_run",
    "terakoya.training.setup",
    "tokenizers",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.run",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "transformers.generation.utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.electra.modeling_electra",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gptj.modeling_gptj",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "typer._click.decorators",
    *(module.name for module in pkgutil.walk_packages(terakoya_plugins.__path__, "terakoya_plugins.")),
)

for name in IMPORTED:
    importlib.import_module(name)
silence_logging()  # imports DeepSpeed where it is installed, as the first save of a model does
get_checkpoint_conversion_mapping("bert")  # compiles a thousand patterns, and keeps them
command_line()
# tensors without data: what torch and Transformers prepare at the first model is kept, and the installed plugins
check_model(Parameters.from_dict(toy.parameters(Path("store")), source="warm"), small_store.vocabulary(200))
loading._current = None  # a process looks for the plugins that its own environment names
# torch's own reads the source of the whole stack and looks through all modules each time that an agent looks for others
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
gc.collect()
frozen.freeze()  # no collection in a forked process looks through what it shares, which would copy it
