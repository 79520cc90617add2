"""Launcher for this machine: one script that starts the processes, and starts them again after a crash."""

from __future__ import annotations

from pathlib import Path
from string import Template

from pydantic import NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.errors import UserError
from terakoya.toolkit.launchers.scripts import SETTLED, head, threads, words

SCRIPT = Template("""\
#!/bin/bash
# $name: $processes on this machine. Ctrl-C or SIGTERM save and leave; run it again and it goes on.
$head$threads
restarts=0
while true; do
  $command & child=$$!
  trap 'kill -TERM $$child 2> /dev/null || true' TERM
  trap : INT  # a terminal sends it to the processes as well
  wait $$child || true
  while kill -0 $$child 2> /dev/null; do wait $$child || true; done  # a signal ends a wait early
  code=0
  wait $$child || code=$$?  # its own code, though it may have ended between those two
  case $$code in
    $settled) exit $$code ;;
  esac
  if [ $$restarts -ge $max_restarts ]; then exit $$code; fi
  restarts=$$((restarts + 1))
  echo "ended with $$code; start $$restarts of $max_restarts anew, from the last checkpoint" >&2
done
""")


class Local(Launcher):
    """Settings of a start on this machine."""

    processes: PositiveInt = 1
    """How many processes: one for each GPU, or for each few cores."""
    max_restarts: NonNegativeInt = 0
    """How often a run that crashed is started again, from its last checkpoint; not one that was asked to stop, or ended
    with an error that somebody must mend."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run first: modules, an environment."""

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """One script, `run.sh`.

        Raises:
            UserError: the parameters are for several nodes.
        """
        if len(job.batch_size) > 1:
            raise UserError(
                f"launch local: batch_size is for {len(job.batch_size)} nodes, this machine is one; add up its rows: "
                f"--set batch_size.-1={sum(job.batch_size.values())}, or launch hosts, slurm, sagemaker"
            )
        script = SCRIPT.substitute(
            name=job.name,
            processes=f"{self.processes} process{'es' if self.processes > 1 else ''}",
            head=head(job, self.setup),
            threads=threads(self.processes),
            command=words("python", "-m", "terakoya", *job.arguments, "--processes", str(self.processes)),
            settled=SETTLED,
            max_restarts=self.max_restarts,
        )
        return LaunchPlan({"run.sh": script}, [words("bash", str(folder / "run.sh"))])


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `local`."""
    return {"local": Local}
