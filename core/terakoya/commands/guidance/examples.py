"""An example for the help of every command."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import typer

WIDTH = 78
"""The columns that an example takes at most; a longer one goes on in the next line."""

EXAMPLES: Mapping[str, str] = {
    "": "terakoya demo",
    "demo": "terakoya demo --out work/demo",
    "init": "terakoya init wiki.jsonl.gz books/ --family bert --goal model --gpu h100 --hours 24",
    "run": "terakoya run pipeline.json",
    "tokenizer": "terakoya tokenizer train corpus.jsonl.gz --type mecab_wordpiece --out work/tokenizer",
    "tokenizer train": "terakoya tokenizer train corpus.jsonl.gz --type mecab_wordpiece --vocab-size 32768 "
    "--out work/tokenizer",
    "tokenizer extend": "terakoya tokenizer extend work/model --corpus corpus.jsonl.gz --add 1000 --out work/extended",
    "tokenizer import": "terakoya tokenizer import tokenizer.model --type sentencepiece --out work/tokenizer",
    "tokenizer count": "terakoya tokenizer count corpus.jsonl.gz --type mecab_wordpiece --out work/words.counts",
    "tokenizer report": "terakoya tokenizer report work/tokenizer --corpus corpus.jsonl.gz",
    "prepare": "terakoya prepare wiki.jsonl.gz books.parquet notes.txt --field text,body --tokenizer work/tokenizer "
    "--out work/store",
    "store": "terakoya store info work/store",
    "store info": "terakoya store info work/store",
    "store count": "terakoya store count work/store work/store.val",
    "store verify": "terakoya store verify work/store",
    "store sample": "terakoya store sample work/store --masks",
    "store import": "terakoya store import megatron_text_document --tokenizer work/tokenizer --out work/store",
    "store merge": "terakoya store merge work/wiki work/books --out work/store",
    "store split": "terakoya store split work/store --parts 98,2 --out work/train --out work/val",
    "store export-blocks": "terakoya store export-blocks work/store --out work/blocks.jsonl.gz --block-size 512",
    "store import-blocks": "terakoya store import-blocks blocks.jsonl.gz --tokenizer work/tokenizer --out work/store",
    "estimate": "terakoya estimate bert_base --vocab-size 32768 --gpus 8 --device h100",
    "train": "terakoya train bert_base --out work/run --set max_steps=100000",
    "launch": "terakoya launch slurm bert_base --out work/run --time 24:00:00",
    "move": "terakoya move work/run hosts:a01:8,a02:8 --out s3://bucket/run",
    "fork": "terakoya fork work/run@8000 --out work/decay --set max_steps=9000 --set schedule.decay_steps=1000",
    "status": "terakoya status work/run --watch",
    "save": "terakoya save work/run",
    "report": "terakoya report work/run --out report.html",
    "verify": "terakoya verify work/run",
    "evaluate": "terakoya evaluate work/model --corpus held_out.jsonl.gz",
    "export": "terakoya export work/run --out work/model",
    "average": "terakoya average work/run --last 5 --out work/averaged",
    "import": "terakoya import megatron checkpoints/iter_0001000 --tokenizer work/tokenizer --out work/model",
    "try": 'terakoya try work/model "東京は日本の[MASK]です。"',
    "finetune": "terakoya finetune work/model --train train.jsonl --eval eval.jsonl --task classification "
    "--out work/classifier",
    "upload": "terakoya upload work/model --name my-lab/my-bert --license apache-2.0",
    "plugins": "terakoya plugins list",
    "plugins list": "terakoya plugins list",
    "plugins show": "terakoya plugins show bert",
    "plugins new": "terakoya plugins new my_schedule --kind schedule",
    "plugins check": "terakoya plugins check my_schedule.py",
    "parameters": "terakoya parameters list",
    "parameters list": "terakoya parameters list",
    "parameters show": "terakoya parameters show bert_base --set max_steps=1000",
    "parameters schema": "terakoya parameters schema > schema.json",
    "parameters import": "terakoya parameters import megatron pretrain_gpt.sh --out gpt.json",
    "doctor": "terakoya doctor",
}
"""Command -> an example of it; "" is `terakoya` itself."""


def add_examples(app: typer.Typer) -> None:
    """Ends the help of `app` and of every command below it with its example."""
    app.info.epilog = _text("")
    for command in app.registered_commands:
        command.epilog = _text(command.name or "")
    for group in app.registered_groups:
        group.epilog = _text(group.name or "")
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            command.epilog = _text(f"{group.name} {command.name}")


def complete_overview(command: Any) -> None:
    """Gives the lists of commands, below `command`, whole sentences: the parser's own are cut to one line. What may be
    given several times is shown as one value: `<path>` for a list of paths, `CORPUS...` for arguments."""
    for parameter in command.params:
        if hasattr(parameter, "display_type"):  # from typer 0.29 on
            parameter.display_type = partial(_type_of_one, parameter.display_type)
        if parameter.nargs == -1:
            shown = (parameter.metavar or parameter.name.upper()).removesuffix("...") + "..."
            parameter.metavar = shown
            parameter.get_usage_pieces = partial(_usage, shown if parameter.required else f"[{shown}]")
    for each in getattr(command, "commands", {}).values():
        each.short_help = " ".join((each.help or "").split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
        complete_overview(each)


def _type_of_one(display_type: Callable[[Any], str | None], ctx: Any) -> str | None:
    shown = display_type(ctx)
    return shown and re.sub(r"list\[(.*)\]", r"\1", shown).replace("<Path>", "<path>")


def _usage(shown: str, ctx: Any) -> list[str]:
    return [shown]


def _text(name: str) -> str | None:
    if name not in EXAMPLES:
        return None
    lines = textwrap.wrap(
        EXAMPLES[name], WIDTH - len("    ") - len(" \\"), break_on_hyphens=False, break_long_words=False
    )
    # \b keeps the lines as they are: a shell takes them with their backslashes
    return "\b\nExample:\n  " + " \\\n    ".join(lines)
