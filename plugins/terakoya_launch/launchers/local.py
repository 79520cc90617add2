"""Launcher for this machine: one script that starts the processes and restarts them after a crash."""

from __future__ import annotations

from pathlib import Path
from string import Template

from pydantic import NonNegativeInt, PositiveInt

from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.errors import UserError
from terakoya_launch.scripts import FINAL_EXIT_CODES, limit_threads, quote, script_head

SCRIPT = Template("""\
#!/bin/bash
# $name: $processes on this machine. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save and end it; run it again to resume.
$head$threads
export TERAKOYA_LAUNCHER=$$$$  # the run saves and ends when this script is killed
restarts=0 child= asked=
trap 'asked=yes; kill -TERM $$child 2> /dev/null || true' TERM HUP USR1
trap : INT  # the terminal also sends it to the processes
while true; do
  $command & child=$$!
  if [ "$$asked" ]; then kill -TERM $$child 2> /dev/null || true; fi  # before there was a child
  wait $$child || true
  while kill -0 $$child 2> /dev/null; do wait $$child || true; done  # a signal interrupts wait
  code=0
  wait $$child || code=$$?  # the exit code, even if the run ended between the two waits
  case $$code in
    $settled) exit $$code ;;
  esac
  if [ "$$asked" ] || [ $$restarts -ge $max_restarts ]; then exit $$code; fi
  restarts=$$((restarts + 1))
  echo "exit code $$code; restart $$restarts of $max_restarts, from the last checkpoint" >&2
done
""")


class Local(Launcher):
    """Settings of a run on this machine."""

    processes: PositiveInt | None = None
    """Number of processes; null is one for each GPU, on a CPU one. Unit: processes."""
    max_restarts: NonNegativeInt = 0
    """How often a crashed run is restarted from its last checkpoint. A run is not restarted after a stop request or an
    error that the user has to fix."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run first: modules, an environment."""

    def nodes(self) -> int:
        return 1

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        if len(job.batch_size) > 1:
            raise UserError(
                f"launch local: batch_size is for {len(job.batch_size)} nodes, this machine is one; sum its rows: "
                f"--set batch_size.-1={sum(job.batch_size.values())}, or launch hosts, slurm, sagemaker"
            )
        count = self.processes
        processes = () if count is None else ("--processes", str(count))
        script = SCRIPT.substitute(
            name=job.name,
            processes="trains" if count is None else f"{count} process{'es' if count > 1 else ''}",
            head=script_head(job, self.setup),
            threads="" if count is None else limit_threads(count),
            command=quote("python", "-m", "terakoya", *job.arguments, *processes),
            settled=FINAL_EXIT_CODES,
            max_restarts=self.max_restarts,
        )
        return LaunchPlan({"run.sh": script}, [quote("bash", str(folder / "run.sh"))])
