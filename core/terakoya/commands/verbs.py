"""The verbs of the core in the order of use, each with an example of it."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, Group, hookimpl
from terakoya.commands import (
    export,
    import_checkpoint,
    plugins,
    prepare,
    save,
    status,
    store,
    tokenizer,
    train,
)
from terakoya.commands.parameters import app as parameters
from terakoya.commands.parameters import list_presets


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    return {
        "tokenizer": Group("Train, import and inspect tokenizers."),
        "tokenizer train": Command(
            tokenizer.train,
            "terakoya tokenizer train corpus.jsonl.gz --type mecab_wordpiece --vocab-size 32768 --out work/tokenizer",
            passes_options=True,
        ),
        "tokenizer import": Command(
            tokenizer.import_tokenizer,
            "terakoya tokenizer import tokenizer.model --type sentencepiece --out work/tokenizer",
            passes_options=True,
        ),
        "prepare": Command(
            prepare.command,
            "terakoya prepare wiki.jsonl.gz books.parquet notes.txt --field text,body --tokenizer "
            "work/tokenizer --out work/store",
        ),
        "store": Group("Inspect, check, import, merge, split and export token stores."),
        "store info": Command(store.info, "terakoya store info work/store"),
        "store count": Command(store.count, "terakoya store count work/store work/store.val"),
        "train": Command(train.command, "terakoya train bert_ja --out work/run --set max_steps=100000"),
        "status": Command(status.command, "terakoya status work/run --watch"),
        "save": Command(save.command, "terakoya save work/run"),
        "export": Command(export.command, "terakoya export work/run --out work/model", passes_options=True),
        "import": Command(
            import_checkpoint.command,
            "terakoya import megatron checkpoints/iter_0001000 --tokenizer work/tokenizer --out work/model",
            passes_options=True,
        ),
        "plugins": Group("List installed plugins, write and check your own."),
        "plugins list": Command(plugins.list_plugins, "terakoya plugins list"),
        "plugins show": Command(plugins.show_component, "terakoya plugins show bert"),
        "parameters": Group("Show and create parameter files."),
        "parameters list": Command(list_presets.command, "terakoya parameters list"),
        "parameters show": Command(parameters.show_parameters, "terakoya parameters show bert_ja --set max_steps=1000"),
    }
