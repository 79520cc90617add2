"""Batch jobs of schedulers that start one script on the first of a job's hosts: the settings, and the script.

It starts a second script on every host, which runs torchrun's agent. What they tell each other lies in files of the
plan's folder, which all hosts see: `JOB.stop` asks all processes to save and exit and says why, `JOB.code` is the exit
code of a job that has ended, `JOB.next` the number of the job that continues it. The script submits that one, as PBS
lets only operators queue a job again, and Grid Engine 8.1.9 queues a job of several hosts that asks for it by its exit
code, but never starts it.
"""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt, field_validator

from terakoya.components import Job, Launcher, LaunchPlan, SubmittedJob
from terakoya.errors import RankLostError, UserError
from terakoya_clusters.launchers.submitted_batch_job import SubmittedBatchJob
from terakoya_launch.job_checks import check_in_job
from terakoya_launch.scheduler_programs import run_program
from terakoya_launch.scripts import FINAL_EXIT_CODES, define_newest, limit_threads, quote, script_head
from terakoya_launch.submitted import SubmittedJobRecord
from terakoya_launch.submitted_batch import JobNumbers

JOB = Template("""\
#!/bin/bash
$directives
# Starts $processes process$es on each of $nodes host$s; saves before the time limit and submits the job that goes on.
${head}\
job=$number
exec >> $folder/$$job.out 2>&1
rm -f $folder/$$job.stop $folder/$$job.code
finish() {
  echo $$1 > $folder/$$job.code
  exit $$1
}
mapfile -t hosts < <($hosts)
if [ $${#hosts[@]} != $nodes ]; then
  echo "batch_size has rows for $nodes host$s, and the scheduler gave $${#hosts[@]}: $${hosts[*]}" >&2
  finish 2
fi
$newest
before=$$(newest)
ask() { [ -e $folder/$$job.stop ] || echo "$$1" > $folder/$$job.stop; }  # all processes save and exit
trap 'ask limit' USR1
trap 'ask deleted' TERM USR2  # the scheduler's warning before it kills
(sleep $seconds; kill -USR1 $$$$) > /dev/null 2>&1 & timer=$$!
started=()
for rank in "$${!hosts[@]}"; do
  node=(bash $folder/node.sh "$$rank" "$$job" "$${hosts[@]}")
  [ "$$rank" = 0 ] || node=($start "$${hosts[rank]}" "$${node[@]}")
  "$${node[@]}" < /dev/null & started+=($$!)
done
code=0
for each in "$${started[@]}"; do
  wait $$each || true
  while kill -0 $$each 2> /dev/null; do wait $$each || true; done  # a signal interrupts wait
  its=0
  wait $$each || its=$$?
  case $$its,$$code in  # a user's mistake counts most, $lost least: that host only waited for a lost one
    0,* | *,2 | *,3) ;;
    2,* | 3,* | *,0 | *,$lost) code=$$its ;;
  esac
done
kill $$timer 2> /dev/null || true

asked=$$(cat $folder/$$job.stop 2> /dev/null || true)
case $$asked in user | deleted) finish $$code ;; esac
first=$${TERAKOYA_FIRST_JOB:-$$job}
again() {
  local next
  if next=$$($qsub -v "TERAKOYA_FIRST_JOB=$$first" $folder/$script); then
    echo "$${next%%.*}" > $folder/$$job.next
    echo "continues in job $${next%%.*}" >&2
    finish $$code
  fi
  echo "no job continues the run, as qsub failed here: give the command of terakoya launch again" >&2
  [ $$code != 75 ] || code=1  # 75 would say that the run was to stop
  finish $$code
}
[ "$$code,$$asked" != 75,limit ] || [ "$$(newest)" != "$$before" ] || code=143  # nothing was trained since the start
case $$code,$$asked in
  75,limit) again ;;
  143,limit) ;;  # a crash, so that a slow start does not start again for ever
  *) case $$code in $settled) finish $$code ;; esac ;;
esac
crashes=$$(($$(cat $folder/$$first.crashes 2> /dev/null || echo 0) + 1))
if [ $$crashes -le $max_restarts ]; then
  echo "exit code $$code; $$crashes of $max_restarts restarts: the next job resumes from the last checkpoint" >&2
  echo $$crashes > $folder/$$first.crashes
  again
fi
finish $$code
""")

NODE = Template("""\
#!/bin/bash
# $name: the processes of one host. Arguments: its number from 0, the job's number, all hosts of the job.
rank=$$1 job=$$2
shift 2
hosts=("$$@")
$head${threads}\
export TERAKOYA_HOST="$${hosts[rank]}" HF_HUB_OFFLINE=1
${environment}\
$inside$agent --node-rank "$$rank" --master-addr "$${hosts[0]}" \\
  --master-port $$((20000 + $${job//[!0-9]/} % 20000)) \\
  $command --node-rank "$$rank" & agent=$$!
trap 'kill -TERM $$agent 2> /dev/null || true' TERM HUP USR1 USR2
until [ -e $folder/$$job.stop ] || ! kill -0 $$agent 2> /dev/null; do
  sleep $poll & wait $$! || true  # a signal interrupts wait
done
kill -TERM $$agent 2> /dev/null || true
while kill -0 $$agent 2> /dev/null; do wait $$agent || true; done
wait $$agent
""")

CHECK = Template("""\
#!/bin/bash
# $name: checks one host. Arguments: its number from 0, the job's number, all hosts of the job.
rank=$$1 job=$$2
shift 2
hosts=("$$@")
${head}\
export GROUP_RANK="$$rank" MASTER_ADDR="$${hosts[0]}" MASTER_PORT=$$((20000 + $${job//[!0-9]/} % 20000))
exec $inside$command
""")

POLL_SECONDS = 2
"""How often a host looks whether it is asked to stop."""
TIME = re.compile(r"(\d+):([0-5]?\d):([0-5]?\d)")


class BatchLauncher(Launcher):
    """What the launchers of such schedulers share. A subclass gives the directives and some bash."""

    detached: ClassVar[bool] = True
    hosts_of_job: ClassVar[str]
    """A command that prints the hosts of the running job, the script's own first, each once."""
    number_of_job: ClassVar[str]
    """An expression for the job's number."""
    qsub_again: ClassVar[str]
    """The command that submits a script, and prints the job's number."""
    script: ClassVar[str]
    """The name of the job's script."""
    submitted: ClassVar[type[SubmittedBatchJob]]
    """What its jobs are."""
    main_setting: ClassVar[str | None] = "queue"

    time: str
    """The time limit of one job: 24:00:00. It saves before that, and submits the job that continues the run."""
    processes: PositiveInt = 1
    """Processes on each host: one for each GPU. Unit: processes."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run first on each host: modules, an environment."""
    inside: str = ""
    """A command to put before that of each host's processes: a container's, such as apptainer exec --nv IMAGE."""
    interface: str | None = None
    """The network interface between the hosts, such as ib0. Default: the one with the route to the other hosts."""
    offline: bool = False
    """Whether the hosts have no internet access: trackers then write only to files. The Hub is never used."""
    after: JobNumbers | None = None
    """Numbers of jobs that must end first, such as the job that makes a store: 120, or 120,121."""
    signal_seconds: PositiveInt = 300
    """How long before its time limit the job saves: longer than a step and a checkpoint take. Unit: seconds."""
    max_restarts: NonNegativeInt = 3
    """How often another job continues the run after a crash."""
    qsub: tuple[str, ...] = ()
    """Further options of qsub, each a line of directives of the script."""
    queue: str | None = None
    """The queue (`-q`); null leaves it to the scheduler."""
    project: str | None = None
    """The project that pays for the job (`-P`). Centres with another option for it, such as -W group_list of PBS and -g
    of Grid Engine, take it in `qsub`."""
    start: str
    """The command to which a host and the command to run there are appended."""

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str) -> str:
        if TIME.fullmatch(value):
            return value
        raise ValueError(f'expected hours, minutes and seconds, such as 24:00:00, got "{value}"')

    def directives(self, job: Job, folder: Path) -> list[str]:
        """Returns the lines of the script that the scheduler reads."""
        raise NotImplementedError

    def qsub_command(self, folder: Path) -> list[str]:
        """Returns the command that submits the script. What the job waits for is no directive: those that the script
        submits do not wait."""
        raise NotImplementedError

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        name = type(self).__name__
        if re.search(r"[\s%:$\\^]", str(folder)):
            raise UserError(f"launch: {folder}: {name} accepts no folder with spaces, %, :, $, ^ or \\; use --folder")
        hours, minutes, seconds = map(int, TIME.fullmatch(self.time).groups())  # type: ignore[union-attr]
        left = 3600 * hours + 60 * minutes + seconds - self.signal_seconds
        if left <= 0:
            raise UserError(
                f"launch: signal_seconds: expected less than the time limit {self.time}, got {self.signal_seconds} s"
            )
        nodes = len(job.batch_size)
        script = JOB.substitute(
            directives="\n".join(self.directives(job, folder)),
            processes=self.processes, es="es" if self.processes > 1 else "",
            nodes=nodes, s="s" if nodes > 1 else "",
            qsub=self.qsub_again,
            script=self.script,
            head=script_head(job, ()),
            number=self.number_of_job,
            hosts=self.hosts_of_job,
            start=self.start,
            seconds=left,
            lost=RankLostError.exit_code,
            settled=FINAL_EXIT_CODES,
            max_restarts=self.max_restarts,
            folder=quote(str(folder)),
            newest=define_newest(job),
        )  # fmt: skip
        rows = ", ".join(map(str, job.batch_size.values()))
        notes = [
            f"rows a step on each host: {rows}; all hosts must see {job.folder}, {job.place} and {folder}",
            f"the job's output is appended to {folder}/JOB.out",
        ]
        return LaunchPlan(
            {self.script: script, "node.sh": self._node(job, folder)}, [quote(*self.qsub_command(folder))], notes
        )

    def check(self, job: Job, folder: Path) -> None:
        check_in_job(self, job, folder)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        command = [*self.qsub_again.split(), *self.qsub_command(folder)[1:]]
        answer = run_program(self.submitted.where, *command) or ""
        number = answer.strip().rpartition("\n")[2].partition(".")[0]
        SubmittedJobRecord(self.submitted.where.removeprefix("launch "), number, job.out).write(folder)
        return 0

    @classmethod
    def find_job(cls, name: str, folder: Path | None = None) -> SubmittedJob:
        """Returns the job with this number, submitted from the plan in `folder`, or the last that continues it."""
        return cls.submitted(name, folder)

    def _ends(self) -> list[str]:
        """Returns the options of qsub that follow from the queue and the project."""
        options = {"-q": self.queue, "-P": self.project}
        return [f"{name} {value}" for name, value in options.items() if value is not None]

    def _node(self, job: Job, folder: Path) -> str:
        inside = f"{self.inside} " if self.inside else ""
        if job.module != "terakoya":
            command = quote("python", "-m", job.module, *job.arguments)
            return CHECK.substitute(name=job.name, head=script_head(job, self.setup), inside=inside, command=command)
        nodes = len(job.batch_size)
        agent = ["python", "-m", "terakoya_launch.torchrun_agent", "--nnodes", str(nodes)]
        return NODE.substitute(
            name=job.name,
            head=script_head(job, self.setup),
            threads=limit_threads(self.processes),
            environment=self._environment(nodes),
            inside=inside,
            agent=quote(*agent, "--nproc-per-node", str(self.processes)),
            command=quote("-m", "terakoya", *job.arguments),
            folder=quote(str(folder)),
            poll=POLL_SECONDS,
        )

    def _environment(self, nodes: int) -> str:
        lines = ["export WANDB_MODE=offline"] if self.offline else []
        if nodes > 1:
            peer = '"${hosts[rank == 0 ? 1 : 0]}"'
            lookup = f"$(python -m terakoya_launch.host_facts --interface {peer})"
            lines.append(f"interface={quote(self.interface) if self.interface else lookup}")
            lines.append('export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"')
        return "".join(f"{line}\n" for line in lines)


def job_name(job: Job) -> str:
    """Returns the job's name, beginning with a letter: schedulers ask for one."""
    return job.name if job.name[0].isalpha() else f"run-{job.name}"
