"""The family `megatron`: weights and launch scripts of Megatron-LM and its relatives. README.md lists what it adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import Exporter, Importer


@hookimpl
def register_commands() -> Mapping[str, Command]:
    from terakoya_megatron.commands import import_script, store_blocks, store_import

    script = "terakoya parameters import megatron pretrain_gpt.sh --out gpt.json"
    tokens = "terakoya store import megatron_text_document --tokenizer work/tokenizer --out work/store"
    blocks_out = "terakoya store export-blocks work/store --out work/blocks.jsonl.gz --block-size 512"
    blocks_in = "terakoya store import-blocks blocks.jsonl.gz --tokenizer work/tokenizer --out work/store"
    return {
        "parameters import": Command(import_script.command, script, after="parameters schema"),
        "store import": Command(store_import.command, tokens, after="store sample"),
        "store export-blocks": Command(store_blocks.export_command, blocks_out, after="store split"),
        "store import-blocks": Command(store_blocks.import_command, blocks_in, after="store export-blocks"),
    }


@hookimpl
def register_importers() -> Mapping[str, type[Importer]]:
    from terakoya_megatron.deepspeed_importer import MegatronDeepSpeed
    from terakoya_megatron.importer import MegatronImporter
    from terakoya_megatron.smdistributed import SmDistributed

    return {"megatron": MegatronImporter, "megatron_deepspeed": MegatronDeepSpeed, "smdistributed": SmDistributed}


@hookimpl
def register_exporters() -> Mapping[str, type[Exporter]]:
    from terakoya_megatron.exporter import MegatronExporter

    return {"megatron": MegatronExporter}
