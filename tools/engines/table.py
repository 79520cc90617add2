"""Prints tables of what was run with each engine and architecture: python tools/engines/table.py [--out FILE.md]
[--quick]. With `--into FILE.md --engine NAME --architecture NAME` the cells that are run replace those of the file.

Two processes on one machine, over gloo, train a toy model for four steps; where kinds of parallelism work together,
four or eight. Four checks compare

- the gradients of the first step with those of one process without an engine;
- a run whose last process is killed with SIGKILL after the third step, and that is then resumed, with an
  uninterrupted run: weights, the optimizer's state and losses, bit by bit;
- the weights of a run that resumes in another engine from the second step's checkpoint with those of one process;
- the export of the last checkpoint with the export of one process.

Errors are relative: the norm of all differences over the norm of all values. The exit status is 1 if an error is above
its limit or a run failed. `--quick` runs one architecture for each engine, without killing or resuming.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import cases
import measures
import runs

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_contract import toy

CHECKS: Mapping[str, str] = {
    "gradients": "Gradients of one step against one process",
    "killed": "Killed and resumed, against an uninterrupted run",
    "another": "Resumed in another engine, against one process",
    "export": "Exports against one process's export",
}
SHARED = 1e-5
"""Limit for the gradients of engines whose processes share a replica (tp, pp, sp, cp)."""
LIMITS: Mapping[str, float] = {"gradients": 1e-6, "killed": 0.0, "another": 1e-5, "export": 1e-5}
PACKAGES = ("terakoya", "torch", "transformers", "accelerate", "deepspeed")


@dataclass
class Table:
    """Cells by check, engine and architecture.

    Attributes:
        reasons: what footnotes of cells say.
        bad: failures and errors above their limits.
    """

    cells: dict[tuple[str, str, str], str] = field(default_factory=dict)
    reasons: dict[tuple[str, str, str], str] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Table:
        """Returns the table that `lines` has written as `text`."""
        table, names, check = cls(), [""], ""
        checks = {f"## {title}": name for name, title in CHECKS.items()}
        notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
        for line in text.splitlines():
            check = checks.get(line, check)
            first, *texts = [each.strip() for each in line.split("|")[1:-1]] or [""]
            if line.startswith("| | "):
                names = texts
            elif first in cases.ENGINES:
                for name, cell in zip(names, texts, strict=True):
                    word, _, number = cell.removesuffix("]").partition(" [")
                    if cell:
                        table.cells[check, first, name] = word
                    if number:
                        table.reasons[check, first, name] = notes[number]
        return table

    def error(self, check: str, engine: str, architecture: str, value: float, note: str = "") -> None:
        """Adds a measured error, in bold if it is above its limit."""
        limit = (
            SHARED
            if check == "gradients" and any(kind in engine for kind in ("tp", "pp", "sp ", "cp "))
            else LIMITS[check]
        )
        text = f"{value:.0e}" if value else "same bits"
        if not value <= limit:
            self.bad.append(f"{CHECKS[check]}: {engine}, {architecture}: {value:.1e}, limit {limit:.0e}")
            text = f"**{text}**"
        self.cells[check, engine, architecture] = text + note
        self.reasons.pop((check, engine, architecture), None)

    def reason(self, check: str, engine: str, architecture: str, word: str, why: str) -> None:
        """Adds the reason why there is no error to measure."""
        self.cells[check, engine, architecture] = word
        self.reasons[check, engine, architecture] = why
        if word == "failed":
            self.bad.append(f"{CHECKS[check]}: {engine}, {architecture}: {why}")

    def lines(self) -> Iterator[str]:
        """Yields the tables in Markdown, without checks that were not run."""
        tested = {engine for _, engine, _ in self.cells}
        engines = [name for name in cases.ENGINES if name in tested]
        numbers: dict[str, int] = {}
        for check, title in CHECKS.items():
            rows = {key: text for key, text in self.cells.items() if key[0] == check}
            if not rows:
                continue
            limit = "the same bits" if check == "killed" else f"at most {LIMITS[check]:.0e}"
            if check == "gradients":
                limit += f", for tp, pp, sp and cp {SHARED:.0e}"
            names = [name for name in cases.ARCHITECTURES if any(key[2] == name for key in rows)]
            yield from (f"## {title}", "", f"Limit: {limit}.", "")
            yield f"| | {' | '.join(names)} |"
            yield "|---" * (len(names) + 1) + "|"
            for engine in engines:
                texts = []
                for name in names:
                    text, why = rows.get((check, engine, name), ""), self.reasons.get((check, engine, name))
                    texts.append(f"{text} [{numbers.setdefault(why, len(numbers) + 1)}]" if why else text)
                yield f"| {engine} | {' | '.join(texts)} |"
            yield ""
        for why, number in numbers.items():
            yield f"{number}. {why}"


class Harness:
    """Runs every case in a scratch folder."""

    def __init__(self, scratch: Path, table: Table, *, report: Callable[[str], None]) -> None:
        self.scratch = scratch
        self.table = table
        self.report = report
        self.store = toy.make_store(scratch / "data").folder
        self.references: dict[str, Path] = {}

    def one_process(self, architecture: str, last: int) -> Path:
        """Returns the folder of the run of one process without an engine."""
        if architecture not in self.references:
            out = self.scratch / f"{architecture}.reference"
            runs.train(cases.parameters(self.store, architecture, None, last=last), out, processes=1)
            measures.export(out)
            self.references[architecture] = out
        return self.references[architecture]

    def refusal(self, engine: str, architecture: str) -> str | None:
        """Why the engine is refused for the architecture; None if it is accepted."""
        try:
            Parameters.from_dict(cases.parameters(self.store, architecture, cases.ENGINES[engine]), source="refused")
        except UserError as error:
            return str(error).removeprefix("refused: ").replace("\n", " ")
        return None

    def case(self, engine: str, architecture: str, *, quick: bool) -> None:
        """Runs the checks of one engine and architecture and fills their cells."""
        table, start = self.table, time.monotonic()
        checks = ("gradients", "export") if quick else tuple(CHECKS)
        why = self.refusal(engine, architecture)
        if why is not None:
            for check in checks:
                table.reason(check, engine, architecture, "refused", why)
            return
        last = cases.MIDDLE if quick else cases.LAST
        reference, out = (
            self.one_process(architecture, last),
            self.scratch / f"{architecture}.{engine}".replace(" ", ""),
        )
        settings = cases.parameters(self.store, architecture, cases.ENGINES[engine], last=last)
        try:
            runs.train(settings, out, processes=cases.processes(engine))
            table.error("gradients", engine, architecture, measures.gradients(out, reference, cases.FIRST))
        except runs.RunError as error:
            for check in checks:
                table.reason(check, engine, architecture, "failed", str(error))
            return
        measures.export(out)
        table.error("export", engine, architecture, measures.exports(out, reference))
        for check, function in {"killed": self._check_killed, "another": self._check_another}.items():
            if check in checks:
                try:
                    function(engine, architecture, out)
                except runs.RunError as error:
                    table.reason(check, engine, architecture, "failed", str(error))
        self.report(f"{engine}, {architecture}: {time.monotonic() - start:.0f} s")

    def _check_killed(self, engine: str, architecture: str, straight: Path) -> None:
        """Kills the same run after its third step and resumes it."""
        out, plugins = straight.with_name(f"{straight.name}.killed"), [Path(__file__).with_name("kill.py")]
        settings = cases.parameters(self.store, architecture, cases.ENGINES[engine])
        processes = cases.processes(engine)
        world = {"processes": processes, "plugins": plugins}
        environment = {"KILL_AFTER": str(cases.MIDDLE + 1), "KILL_RANK": str(processes - 1)}
        runs.train(settings, out, environment=environment, killed=True, **world)  # type: ignore[arg-type]
        if not 0 < measures.saved_step(out) <= cases.MIDDLE:
            raise runs.RunError(
                f"killed after step {cases.MIDDLE + 1}, the run had saved step {measures.saved_step(out)}"
            )
        runs.train(settings, out, **world)  # type: ignore[arg-type]
        self.table.error("killed", engine, architecture, measures.difference(out, straight, cases.LAST))

    def _check_another(self, engine: str, architecture: str, source: Path) -> None:
        """Resumes in the middle with the next engine that accepts the architecture."""
        names = list(cases.ENGINES)
        at = names.index(engine)
        other = next(name for name in names[at + 1 :] + names[:at] if self.refusal(name, architecture) is None)
        out = source.with_name(f"{source.name}.another")
        folder = measures.checkpoint_folder(source, cases.MIDDLE)
        shutil.copytree(folder, out / "checkpoints" / folder.name)
        settings = cases.parameters(self.store, architecture, cases.ENGINES[other])
        runs.train(settings, out, processes=cases.processes(other))
        error = measures.weights(out, self.one_process(architecture, cases.LAST), cases.LAST)
        self.table.error("another", engine, architecture, error, f" ({other})")


def main() -> int:
    """Prints or writes the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--out", type=Path, help="output file; default: print the tables")
    files.add_argument("--into", type=Path, help="file of these tables whose other cells stay")
    parser.add_argument("--quick", action="store_true", help="one architecture for each engine")
    parser.add_argument("--engine", action="append", choices=cases.ENGINES, help="only this one; may be repeated")
    parser.add_argument(
        "--architecture", action="append", choices=cases.ARCHITECTURES, help="only this one; may be repeated"
    )
    arguments = parser.parse_args()
    table = Table.read(arguments.into.read_text(encoding="utf-8")) if arguments.into else Table()
    header, out = _header(arguments.quick), arguments.into or arguments.out
    with tempfile.TemporaryDirectory() as scratch:
        harness = Harness(Path(scratch), table, report=lambda text: print(text, file=sys.stderr, flush=True))
        for architecture in arguments.architecture or cases.ARCHITECTURES:
            for engine in arguments.engine or cases.ENGINES:
                if not arguments.quick or cases.QUICK.get(engine) == architecture:
                    harness.case(engine, architecture, quick=arguments.quick)
                if out:  # after each case, so that an interruption keeps the results
                    out.write_text("\n".join([*header, *table.lines()]) + "\n", encoding="utf-8")
    if not out:
        print("\n".join([*header, *table.lines()]))
    for bad in table.bad:
        print(bad, file=sys.stderr)
    return 1 if table.bad else 0


def _header(quick: bool) -> list[str]:
    """The title, the setup of the runs and the versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    command = "python tools/engines/table.py" + (" --quick" if quick else "")
    layers, width = cases.SIZES["num_hidden_layers"], cases.SIZES["hidden_size"]
    return [
        "# Engines",
        "",
        f"Generated by `{command}`: 2 processes over gloo on one machine without a GPU, 4 or 8 where kinds of "
        f"parallelism work together, fp32, models of {layers} blocks of {width}, 7 rows of packed documents per step "
        "in micro-batches of 2. Errors are relative: the norm of all differences over the norm of all values. An empty "
        "cell was not run. Cells can be run again into the table (`--into`), so some are older than others; versions "
        "are those of the last run. Python "
        f"{platform.python_version()}, {versions}.",
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
