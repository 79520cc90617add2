"""Checks the nodes of a cluster in a short job of the scheduler, as the run itself would be started there."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from terakoya import log
from terakoya.components import Job, Launcher, SubmittedJob
from terakoya_launch.host_checks import Answer, find_problems, raise_on_problems, results_table
from terakoya_launch.submitted import SubmittedJobRecord

MODULE = "terakoya_launch.host_facts"
BRIEF = {"time": "00:10:00", "max_restarts": 0, "after": None, "signal_seconds": 60}
"""The settings of a job that checks, in the place of the run's."""
POLL_SECONDS = 2.0
ANSWER = '{"rank"'
"""How a node's answer begins in the output."""
SHOWN_LINES = 5
"""How many of the last lines of the output are shown where a node has given no answer."""


def check_in_job(launcher: Launcher, job: Job, folder: Path) -> None:
    """Submits a job with the settings of `launcher` that runs `host_facts` on each node of `job` in the place of the
    run, from the plan's folder `folder`/check; waits for it, prints what the nodes say, and compares it. Ctrl-C deletes
    the job.

    Raises:
        UserError: a node gives no answer, cannot run the job or differs from the others; one line a problem.
    """
    here = folder / "check"
    here.mkdir(parents=True, exist_ok=True)
    proof = here / f".seen-{secrets.token_hex(4)}"
    nodes = len(job.batch_size)
    seen = next(each for each in (job.run, *job.run.parents) if each.exists())
    paths = [str(path) for path in (proof, *job.data_folders, *([] if job.kept_in else [seen]))]
    request = {"nodes": nodes, "paths": paths, "interface": getattr(launcher, "interface", None)}
    checking = replace(
        job, name=f"check-{job.name}"[:63].rstrip("-"), module=MODULE, arguments=("--in-job", json.dumps(request))
    )
    processes = getattr(launcher, "processes", 1)
    brief = launcher.model_copy(update={**BRIEF, "processes": 1})
    plan = brief.plan(checking, here)
    for name, text in plan.files.items():
        (here / name).write_text(text, encoding="utf-8")
    proof.touch()
    try:
        brief.submit(checking, plan, here)
        record = SubmittedJobRecord.read(here)
        assert record is not None
        log.console().print(f"job {record.job} checks {nodes} node{'s' if nodes > 1 else ''} ...", markup=False)
        _wait(launcher.find_job(record.job, here))
    finally:
        proof.unlink()
    lines = _read_output(here / f"{record.job}.out", nodes)
    answers = _answers(lines, nodes, here / f"{record.job}.out")
    first = answers[0]
    port = first.facts["tried_port"] if first.facts is not None else 0
    if first.facts is not None and first.facts["port"] is not None:
        first.problems.append(f"port {port}: {first.facts['port']}; submit again: another job has another port")
    for answer in answers:
        find_problems(answer, first, processes, shared=here, proof=proof, port=port)
    log.console().print(results_table(answers, f"{first.host}:{port}"))
    raise_on_problems(answers)


def _wait(job: SubmittedJob) -> None:
    """Returns when `job` has ended; Ctrl-C deletes it."""
    last = ""
    try:
        while not (state := job.state()).done:
            if (said := f"{state.status}  {state.detail}".strip()) != last:
                last = said
                log.console().print(said, markup=False, soft_wrap=True)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        log.console().print(job.stop(), markup=False, soft_wrap=True)
        raise


def _read_output(file: Path, nodes: int) -> list[str]:
    """Returns the lines of the job's output; a file server may show the last ones late."""
    for _ in range(10):
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        if sum(line.count(ANSWER) for line in lines) >= nodes:
            break
        time.sleep(0.5)
    return lines


def _answers(lines: list[str], nodes: int, file: Path) -> list[Answer]:
    """Returns the answers by rank; those that are missing have the end of the output as their error."""
    facts: dict[int, dict[str, Any]] = {}
    for line in lines:
        for text in (ANSWER + each for each in line.split(ANSWER)[1:]):  # nodes that write at a time may share a line
            with contextlib.suppress(json.JSONDecodeError):  # one that is cut is none
                told = json.JSONDecoder().raw_decode(text)[0]
                facts[told["rank"]] = told
    others = [line for line in lines if not line.startswith("{")]
    answers = []
    for rank in range(nodes):
        told = facts.get(rank)
        if told is not None:
            answers.append(Answer(told["host"], told, clock=told["offset"] or 0.0))
        else:
            end = "\n    ".join(["", *others[-SHOWN_LINES:]])
            answers.append(Answer(f"node {rank}", error=f"gave no answer; {file} ends with:{end}"))
    return answers
