"""The family `megatron`: weights and launch scripts of Megatron-LM and its relatives. README.md lists what it adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import Exporter, Importer


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Registers `parameters import`."""
    from terakoya_megatron.commands import import_script

    example = "terakoya parameters import megatron pretrain_gpt.sh --out gpt.json"
    return {"parameters import": Command(import_script.command, example, after="parameters schema")}


@hookimpl
def register_importers() -> Mapping[str, type[Importer]]:
    """Registers `megatron`, `megatron_deepspeed` and `smdistributed`."""
    from terakoya_megatron.deepspeed_importer import MegatronDeepSpeed
    from terakoya_megatron.importer import MegatronImporter
    from terakoya_megatron.smdistributed import SmDistributed

    return {"megatron": MegatronImporter, "megatron_deepspeed": MegatronDeepSpeed, "smdistributed": SmDistributed}


@hookimpl
def register_exporters() -> Mapping[str, type[Exporter]]:
    """Registers `megatron`."""
    from terakoya_megatron.exporter import MegatronExporter

    return {"megatron": MegatronExporter}
