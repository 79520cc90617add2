"""Megatron-LM's checkpoints and scripts, read and written; Megatron-DeepSpeed's checkpoints, read."""

from __future__ import annotations

from terakoya import hookimpl
from terakoya.components import Exporter, Importer
from terakoya_plugins.formats.megatron.deepspeed_importer import MegatronDeepSpeed
from terakoya_plugins.formats.megatron.exporter import Megatron as MegatronExporter
from terakoya_plugins.formats.megatron.importer import Megatron as MegatronImporter


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    """Offers `megatron` and `megatron_deepspeed`."""
    return {"megatron": MegatronImporter, "megatron_deepspeed": MegatronDeepSpeed}


@hookimpl
def register_exporters() -> dict[str, type[Exporter]]:
    """Offers `megatron`."""
    return {"megatron": MegatronExporter}
