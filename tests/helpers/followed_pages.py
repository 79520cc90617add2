"""Pages of the documentation, and a reader who follows them: who writes the files and types the commands, in order.

The comment above a block of code says what a reader does with it:

    <!-- file: NAME -->          writes it into the file NAME
    <!-- run -->                 types it into a shell
    <!-- run: ends with 2 -->    the same; its exit code is 2
    <!-- python -->              runs it as a program
    <!-- not run: REASON -->     nothing here, and the reason

After `file small:` and `run small`, sizes are those of a toy: see SMALL and SMALLER.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
from documented_commands import ROOT

from terakoya.json_settings import apply_overrides

BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.S | re.M)
MARK = re.compile(r"(file|run|python|not run)( small)?(?:: (.+))?")

SMALL = [
    "architecture.hidden_size=64", "architecture.num_hidden_layers=1", "architecture.num_attention_heads=4",
    "batch_size={\"-1\": 4}", "micro_batch_size=null", "precision=fp32", "max_steps=2", "schedule.warmup_steps=1",
    "evaluation.steps=2", "evaluation.batches=1",
]  # fmt: skip
"""What `run small` adds to a training."""

SMALLER = {
    '"parameters": "bert_ja"': '"parameters": "small.json"',
    '"hold_out": 1000': '"hold_out": 20',
    '"vocab_size": 32768': '"vocab_size": 3000',
    "--vocab-size 16000": "--vocab-size 1500",
    "--parts 998,1,1": "--parts 8,1,1",
    '"share": 0.01': '"share": 0.2',
}
"""What `file small` and `run small` replace, because the reader's corpus is small."""

PROGRAMS = {"terakoya": "terakoya", "torchrun": "torch.distributed.run"}
"""Programs that a reader types, and the modules that they are."""


SHIM = """\
#!/bin/bash
[[ ! $* =~ ^(.*-m terakoya )?train || -z $SMALL ]] || readarray -t small <<< "$SMALL"
[[ $* == "plugins check "* ]] && python={cold} || python={warm}  # it looks at what a new process imports
exec $python -c '{run}' {module} "$@" "${{small[@]}}"
"""
RUN = """\
import os, random, runpy, sys
os.sched_setaffinity(0, [random.choice(list(os.sched_getaffinity(0)))])
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Runs a module on one core, where nothing starts workers: for a small corpus their start is most of the time."""


class Block(NamedTuple):
    """A block of code, and what the comment above it says."""

    kind: str
    """`file`, `run`, `python`, `not run`, or nothing where there is no such comment."""
    small: bool
    what: str
    """The file's name, how the block ends, or why it is not run."""
    language: str
    content: str


def blocks_of(page: str) -> list[Block]:
    """The blocks of code of `page`, a path in the repository."""
    found = []
    for mark, language, content in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        kind, small, what = match.groups() if (match := MARK.fullmatch(mark)) else ("", None, None)
        found.append(Block(kind, bool(small), what or "", language, content))
    return found


class Reader:
    """A reader with a shell in `folder`, where terakoya is a fork of what the stand-in `python` has imported."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}
        """Content of a block -> what it printed."""
        programs = folder.parent / "programs"
        programs.mkdir()
        for name, module in PROGRAMS.items():
            program = programs / name
            program.write_text(SHIM.format(warm=python, cold=sys.executable, module=module, run=RUN))
            program.chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                             "HF_MODULES_CACHE": str(folder / "modules"), "SMALL": ""}  # fmt: skip
        self._environment.pop("TERAKOYA_LANG", None)
        self._write_corpora()

    def _write_corpora(self) -> None:
        """Writes the corpora that pages name, of the documents that come with terakoya, and the file of SMALLER."""
        preset = json.loads((ROOT / "parameters" / "tiny_bert.json").read_text(encoding="utf-8"))
        small = json.dumps(apply_overrides(preset, SMALL))
        (self.folder / "small.json").write_text(small, encoding="utf-8")
        text = (ROOT / "core" / "terakoya" / "corpus" / "demo_corpus.txt").read_text(encoding="utf-8")
        (self.folder / "corpus.txt").write_text(text, encoding="utf-8")
        documents = text.split("\n\n")
        (self.folder / "corpus" / "wiki").mkdir(parents=True)
        parts = {f"corpus/{letter}": documents[number::8] for number, letter in enumerate("abcdef")}
        parts |= {"corpus/wiki/all": documents, "validation": documents[6::8], "held_out": documents[7::60]}
        for name, part in parts.items():
            with gzip.open(self.folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in part)
        (self.folder / "corpus" / "fiction.txt").write_text("\n".join(text.split()), encoding="utf-8")
        for name, part in (("tech", documents), ("tech.val", documents[2::6])):
            pyarrow.parquet.write_table(pyarrow.table({"body": part}), self.folder / "corpus" / f"{name}.parquet")

    def follow(self, page: str) -> None:
        """Does what `page` says; fails with the output of what fails."""
        for block in blocks_of(page):
            if block.kind == "file":
                self._write(block)
            elif block.kind == "run":
                self._type(block, page)
            elif block.kind == "python":
                self._run(block, page)

    def _write(self, block: Block) -> None:
        file = self.folder / block.what
        file.parent.mkdir(exist_ok=True)
        file.write_text(_in_its_size(block), encoding="utf-8")

    def _type(self, block: Block, page: str) -> None:
        small = "\n".join(word for each in SMALL for word in ("--set", each)) if block.small else ""
        expected = int(block.what.removeprefix("ends with ")) if block.what else 0
        self._start(["bash", "-exc", _in_its_size(block)], block, page, expected, SMALL=small)

    def _run(self, block: Block, page: str) -> None:
        content = block.content
        if "import terakoya" not in content:
            content += "\nimport sys\nassert 'terakoya' not in sys.modules\n"
        self._start([sys.executable, "-c", content], block, page, 0)

    def _start(self, words: list[str], block: Block, page: str, expected: int, **variables: str) -> None:
        done = subprocess.run(words, cwd=self.folder, env=self._environment | variables, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
        assert done.returncode == expected, f"{page}\n{block.content}\n{done.stdout}\n{done.stderr}"
        self.printed[block.content] = done.stdout


def _in_its_size(block: Block) -> str:
    content = block.content
    for here, smaller in SMALLER.items() if block.small else ():
        content = content.replace(here, smaller)
    return content
