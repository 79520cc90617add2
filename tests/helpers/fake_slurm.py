"""A Slurm for tests: sbatch only queues, `work_off` runs what is queued on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SBATCH = """#!{python}
import json, os, sys
from pathlib import Path

spool = Path(os.environ["FAKE_SLURM"])
options = [each for each in sys.argv[1:] if each.startswith("-")]
files = [each for each in sys.argv[1:] if not each.startswith("-")]
script = Path(files[0]).read_text() if files else sys.stdin.read()
if not script.startswith("#!"):
    sys.exit("sbatch: error: This does not look like a batch script")
in_script = [line.split(None, 1)[1] for line in script.splitlines() if line.startswith("#SBATCH ")]
number = len(list(spool.glob("*.sh"))) + 101
(spool / f"{{number}}.sh").write_text(script)
job = dict(options=in_script + options, cwd=os.getcwd(), environment=dict(os.environ), state="queued")
(spool / f"{{number}}.json").write_text(json.dumps(job))
print(number if "--parsable" in options else f"Submitted batch job {{number}}")
"""
SQUEUE = """#!{python}
import json, os, sys
from pathlib import Path

assert sys.argv[1:] == ["--noheader", "--format=%F"], sys.argv
for file in sorted(Path(os.environ["FAKE_SLURM"]).glob("*.json")):
    if json.loads(file.read_text())["state"] == "queued":
        print(file.stem)
"""
SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do if [ "$1" = -n ]; then shift; fi; shift; done
exec "$@"
"""
LAUNCH = """#!/bin/sh
exec {python} -c "from datatrove.tools.launch_pickled_pipeline import main; main()" "$@"
"""
"""Datatrove's program, for a `sys.executable` beside which there is none."""
SCONTROL = """#!/bin/bash
echo "$3"
"""


class FakeSlurm:
    """Its programs lie in `folder`/bin, its queue in `folder`/spool; `environment` is what finds them."""

    def __init__(self, folder: Path) -> None:
        self.spool, programs = folder / "spool", folder / "bin"
        self.spool.mkdir(parents=True)
        programs.mkdir()
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "launch_pickled_pipeline": LAUNCH}.items():
            (programs / name).write_text(text.format(python=sys.executable))
        (programs / "srun").write_text(SRUN)
        (programs / "scontrol").write_text(SCONTROL)
        for program in programs.iterdir():
            program.chmod(0o755)
        self.environment = {
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "FAKE_SLURM": str(self.spool),
        }

    def jobs(self) -> dict[str, dict[str, str]]:
        """The options of every job, by its number."""
        return {
            file.stem: dict(_option(each) for each in json.loads(file.read_text())["options"])
            for file in sorted(self.spool.glob("*.json"))
        }

    def work_off(self, *, run: Callable[[str, int], bool] = lambda job, task: True) -> dict[str, str]:
        """Runs what is queued, one task after the other; one for which `run(job, task)` is false fails at once.

        Returns how each job ended: "completed", "failed" or "cancelled"."""
        states = {}
        for file in sorted(self.spool.glob("*.json")):
            job = json.loads(file.read_text())
            if job["state"] == "queued":
                job["state"] = self._work(file, dict(_option(each) for each in job["options"]), job, run)
                file.write_text(json.dumps(job))
            states[file.stem] = job["state"]
        return states

    def _work(self, file: Path, options: dict[str, str], job: dict, run: Callable[[str, int], bool]) -> str:
        for dependency in filter(None, options.get("dependency", "").split(",")):
            kind, _, before = dependency.partition(":")
            state = json.loads((self.spool / f"{before}.json").read_text())["state"]
            if kind == "afterok" and state != "completed":
                return "cancelled"
        exported = dict(each.split("=", 1) for each in options.get("export", "").split(",") if "=" in each)
        array = re.match(r"(\d+)-(\d+)", options.get("array", ""))
        state = "completed"
        for task in range(int(array[1]), int(array[2]) + 1) if array else [None]:
            environment = {**job["environment"], **exported, "SLURM_JOB_ID": file.stem, "SLURM_NODELIST": "here"}
            environment["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
            output = options["output"].replace("%A", file.stem).replace("%j", file.stem)
            if task is not None:
                environment["SLURM_ARRAY_TASK_ID"] = str(task)
                output = output.replace("%a", str(task))
            if not run(file.stem, task or 0):
                state = "failed"
                continue
            folder = Path(options.get("chdir", job["cwd"]))
            with (folder / output).open("w") as log:
                done = subprocess.run(
                    ["bash", self.spool / f"{file.stem}.sh"], cwd=folder, env=environment, stdout=log, stderr=log,
                    check=False,
                )  # fmt: skip
            state = state if done.returncode == 0 else "failed"
        return state


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.lstrip("-").partition("=")
    return name, value
