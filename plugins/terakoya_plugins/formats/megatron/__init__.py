"""Imports and exports Megatron-LM's checkpoints, and imports Megatron-DeepSpeed's checkpoints and launch scripts.

Checkpoints:

- `arguments`: reads from a checkpoint's arguments which model it contains, and refuses models that are not supported.
- `weights`: maps Megatron's weights to Transformers', and splits and joins tensor-parallel shards.
- `qkv_order`: reorders the fused queries, keys and values of old checkpoints.
- `importer`: the importer `megatron`, for checkpoints and launch scripts of Megatron-LM.
- `deepspeed_importer`: the importer `megatron_deepspeed`, for the pipeline checkpoints of Megatron-DeepSpeed.
- `exporter`: the exporter `megatron`.

Launch scripts (`terakoya parameters import megatron FILE.sh`), in the order in which they are read:

- `shell_script`: expands the variables of a bash script and finds its commands, without running anything.
- `script_options`: finds the training command, parses its options, and records what each option becomes.
- `script_flags`: the table of all known options; the page MEGATRON_FLAGS.md is generated from it.
- `script_parameters`: converts the options to the parameter JSON: data, architecture, objective, optimizer, schedule.
- `script_run`: the rest of the parameter JSON: length, precision, processes, checkpoints, trackers.
"""

from __future__ import annotations

from terakoya import hookimpl
from terakoya.components import Exporter, Importer
from terakoya_plugins.formats.megatron.deepspeed_importer import MegatronDeepSpeed
from terakoya_plugins.formats.megatron.exporter import MegatronExporter
from terakoya_plugins.formats.megatron.importer import MegatronImporter


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    """Registers `megatron` and `megatron_deepspeed`."""
    return {"megatron": MegatronImporter, "megatron_deepspeed": MegatronDeepSpeed}


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    """Registers `megatron`."""
    return {"megatron": MegatronExporter}
