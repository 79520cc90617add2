"""Launcher for hosts that ssh reaches: a script for each, which starts its processes with torchrun.

Without restarts the hosts need nothing but the first one's address. With restarts torchrun's agents meet there, and a
process that is lost makes all of them start anew from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan, batch_table
from terakoya.errors import UserError
from terakoya.toolkit.launchers.scripts import head, threads, words
from terakoya_plugins.launchers.hosts.hostfile import Host, read_hosts

NODE = Template("""\
#!/bin/bash
# $name on $host: node $rank of $nodes, $processes process$es
$head$threads${environment}\
echo $$$$ > $folder/node-$rank.pid
exec $command
""")

MEETING_SECONDS = 60
"""The least that agents wait for each other: they come as fast as hosts import torch."""
RESTARTS = 3
"""How often a run starts anew where lost nodes are to be made up for and nothing else was said."""


class Hosts(Launcher):
    """Settings of a start on hosts."""

    trial: ClassVar[Mapping[str, Any]] = {"hosts": "a01:4,a02:4"}

    hosts: str
    """A file of hosts as DeepSpeed, Megatron-LM, MPI and Grid Engine have it (`a01 slots=4`, `a01:4`), or names:
    `a01:4,a02:4`. The first is node 0, where the others call."""
    processes: PositiveInt = 1
    """Processes on a host for which `hosts` says nothing: one for each of its GPUs."""
    interface: str | None = None
    """The network interface that processes talk over, such as eth0; if not given, the one that leads to the others."""
    port: Annotated[int, Field(ge=1, le=65535)] = 29500
    """A port of the first host that is free and that the others reach."""
    max_restarts: NonNegativeInt = 0
    """How often all processes are started anew after one was lost; 3 where `on_lost_node` is redistribute."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run first on each host: modules, an environment."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
    """The command that is followed by a host and what to run there."""

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """A script `node-N.sh` for each host.

        Raises:
            UserError: the list of hosts cannot be read, or does not fit the table of rows.
        """
        hosts = read_hosts(self.hosts)
        rows = _rows(job, hosts)
        counts = self._counts(hosts)
        for host, count, share in zip(hosts, counts, rows, strict=True):
            if share < count:
                raise UserError(f"launch hosts: {host.name} would share {share} rows among {count} processes")
        files = {f"node-{rank}.sh": self._script(job, folder, hosts, counts, rank) for rank in range(len(hosts))}
        table = "\n".join(
            f"  node {rank}: {host.name}, {count} process{'es' if count > 1 else ''}, {share} rows a step"
            for rank, (host, count, share) in enumerate(zip(hosts, counts, rows, strict=True))
        )
        scripts = {host.name: words("bash", str(folder / name)) for host, name in zip(hosts, files, strict=True)}
        paste = "\n".join(f"  {host}: {line}" for host, line in scripts.items())
        notes = [
            f"{sum(counts)} processes, {sum(rows)} rows a step:\n{table}",
            f"all hosts see {folder} and {job.run}; where ssh does not reach them, paste one on each:\n{paste}",
        ]
        if self._restarts(job) and len(hosts) > 1:
            notes.append(self._when_lost(job, hosts))
        return LaunchPlan(files, [f"{self.ssh} {host} {words(line)}" for host, line in scripts.items()], notes)

    def check(self, job: Job, folder: Path) -> None:
        """Asks all hosts what they have and see, shows it, and refuses what would not go well.

        Raises:
            UserError: a host that is not reached, or is not like the others; a line for each, with what to do.
        """
        from terakoya import log
        from terakoya_plugins.launchers.hosts import checks as host_checks

        hosts = read_hosts(self.hosts)
        names = [host.name for host in hosts]
        answers = host_checks.look(
            host_checks.Asked(
                names, self._counts(hosts), ssh=self.ssh, folder=job.folder, seen=folder, port=self.port,
                reads=job.reads, setup=self.setup, interface=self.interface,
            )
        )  # fmt: skip
        log.console().print(host_checks.show(answers, first=hosts[0].address, port=self.port))
        host_checks.refuse(answers)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Looks at all hosts, starts them at once, shows what each says behind its name, and waits for them."""
        from terakoya_plugins.launchers.hosts.run_on_hosts import Remote, run_together

        self.check(job, folder)
        hosts = read_hosts(self.hosts)
        return run_together(
            [
                Remote(host.name, command, f"{self.ssh} {host.name} {words(_stop(folder, rank))}")
                for rank, (host, command) in enumerate(zip(hosts, plan.commands, strict=True))
            ],
            others_go_on=job.on_lost_node == "redistribute",
        )

    def _counts(self, hosts: Sequence[Host]) -> list[int]:
        return [host.processes or self.processes for host in hosts]

    def _restarts(self, job: Job) -> int:
        return self.max_restarts or (RESTARTS if job.on_lost_node == "redistribute" else 0)

    def _when_lost(self, job: Job, hosts: Sequence[Host]) -> str:
        restarts = self._restarts(job)
        said = f"a lost process makes all start anew from the last checkpoint, up to {restarts} times"
        if job.on_lost_node == "redistribute":
            return f"{said}; when a host is lost the others go on, unless it is {hosts[0].name}, where they meet"
        return f"{said}; a lost host ends the run, and the same command goes on"

    def _script(self, job: Job, folder: Path, hosts: Sequence[Host], counts: Sequence[int], rank: int) -> str:
        processes = counts[rank]
        return NODE.substitute(
            name=job.name,
            host=hosts[rank].name,
            rank=rank,
            nodes=len(hosts),
            processes=processes,
            es="es" if processes > 1 else "",
            head=head(job, self.setup),
            threads=threads(processes),
            environment=self._environment(job, hosts, rank),
            folder=words(str(folder)),
            # torchrun numbers its agents as they come; the table of rows is by this rank
            command=words(
                *self._torchrun(job, hosts, processes, rank), "-m", "terakoya", *job.arguments, "--node-rank", str(rank)
            ),
        )

    def _environment(self, job: Job, hosts: Sequence[Host], rank: int) -> str:
        """Lines of bash that set the variables of torchrun, and of NCCL and gloo."""
        lines = [f"export TERAKOYA_HOST={words(hosts[rank].address)}"]  # the name that the table of rows may have
        if self._restarts(job):
            lines.append("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torchrun's store keeps addresses of the dead")
        if len(hosts) > 1:
            peer = hosts[1 if rank == 0 else 0].address
            lookup = f"$(python -m terakoya.launch.host_facts --interface {words(peer)})"
            lines.append(f"interface={words(self.interface) if self.interface else lookup}")
            lines.append('export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"')
        return "".join(f"{line}\n" for line in lines)

    def _torchrun(self, job: Job, hosts: Sequence[Host], processes: int, rank: int) -> list[str]:
        first, nodes = hosts[0].address, str(len(hosts))
        if not self._restarts(job):
            where = ["--node-rank", str(rank), "--master-addr", first, "--master-port", str(self.port)]
        else:
            if job.on_lost_node == "redistribute":
                nodes = f"1:{nodes}"
            meeting = max(MEETING_SECONDS, job.timeout_seconds)
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{self.port}", "--rdzv-id", job.name]
            where += ["--rdzv-conf", f"is_host={int(rank == 0)},join_timeout={meeting}"]
            where += ["--local-addr", hosts[rank].address, "--max-restarts", str(self._restarts(job))]
        return [
            "python",
            "-m",
            "terakoya.launch.torchrun_agent",
            "--nnodes",
            nodes,
            "--nproc-per-node",
            str(processes),
            *where,
        ]


def _rows(job: Job, hosts: Sequence[Host]) -> list[int]:
    """The rows of each host.

    Raises:
        UserError: with a table that fits.
    """
    there = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} ({', '.join(host.address for host in hosts)})"
    rows = batch_table.rows_of_nodes(
        job.batch_size,
        {rank: host.address for rank, host in enumerate(hosts)},
        there=there,
        redistribute=job.on_lost_node == "redistribute",
    )
    return list(rows.values())


def _stop(folder: Path, rank: int) -> str:
    """A line for the host of `rank` that asks its processes to save and leave."""
    return f"kill -TERM $(cat {words(str(folder / f'node-{rank}.pid'))})"


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `hosts`."""
    return {"hosts": Hosts}
