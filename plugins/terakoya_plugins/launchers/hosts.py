"""Launcher for hosts that ssh reaches: a script for each, which starts its processes with torchrun.

Without restarts the hosts need nothing but the first one's address. With restarts torchrun's agents meet there, and a
process that is lost makes all of them start anew from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.errors import UserError
from terakoya.host_list import Host, read_hosts
from terakoya.launch_scripts import head, threads, words

NODE = Template("""\
#!/bin/bash
# $name on $host: node $rank of $nodes, $processes process$es
$head$threads${environment}\
echo $$$$ > $folder/node-$rank.pid
exec $command
""")

SAVING_SECONDS = 900
"""How long torchrun lets processes save before it kills them, once it was asked to stop; its own default is 30."""


class Hosts(Launcher):
    """Settings of a start on hosts."""

    trial: ClassVar[Mapping[str, Any]] = {"hosts": "a01:4,a02:4"}

    hosts: str
    """A file of hosts as DeepSpeed, Megatron-LM and MPI have it (`a01 slots=4`, `a01:4`), or names: `a01:4,a02:4`. The
    first is node 0, where the others call."""
    processes: PositiveInt = 1
    """Processes on a host for which `hosts` says nothing: one for each of its GPUs."""
    interface: str | None = None
    """The network interface that processes talk over, such as eth0; chosen by NCCL and gloo where not given."""
    port: Annotated[int, Field(ge=1, le=65535)] = 29500
    """A port of the first host that is free and that the others reach."""
    max_restarts: NonNegativeInt = 0
    """How often all processes are started anew after one was lost."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run first on each host: modules, an environment."""
    ssh: str = "ssh -o BatchMode=yes"
    """The command that is followed by a host and what to run there."""

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """A script `node-N.sh` for each host.

        Raises:
            UserError: the list of hosts cannot be read, or is not as long as the table of rows.
        """
        hosts = read_hosts(self.hosts)
        rows = _rows(job, hosts)
        counts = [host.processes or self.processes for host in hosts]
        for host, count, share in zip(hosts, counts, rows, strict=True):
            if share < count:
                raise UserError(f"launch hosts: {host.name} would share {share} rows among {count} processes")
        files = {f"node-{rank}.sh": self._script(job, folder, hosts, counts, rank) for rank in range(len(hosts))}
        table = "\n".join(
            f"  node {rank}: {host.name}, {count} process{'es' if count > 1 else ''}, {share} rows a step"
            for rank, (host, count, share) in enumerate(zip(hosts, counts, rows, strict=True))
        )
        notes = [
            f"{sum(counts)} processes, {sum(rows)} rows a step:\n{table}",
            f"all hosts see {folder} and {job.run}; where ssh does not reach a host, run its script there",
        ]
        commands = [
            f"{self.ssh} {host.name} bash {words(str(folder / name))}" for host, name in zip(hosts, files, strict=True)
        ]
        return LaunchPlan(files, commands, notes)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Starts all hosts at once, shows what each says behind its name, and waits for them."""
        from terakoya.host_start import Remote, run_together

        hosts = read_hosts(self.hosts)
        return run_together(
            [
                Remote(host.name, command, f"{self.ssh} {host.name} {words(_stop(folder, rank))}")
                for rank, (host, command) in enumerate(zip(hosts, plan.commands, strict=True))
            ]
        )

    def _script(self, job: Job, folder: Path, hosts: list[Host], counts: list[int], rank: int) -> str:
        processes = counts[rank]
        environment = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVING_SECONDS}\n"
        if self.interface is not None:
            environment += f"export NCCL_SOCKET_IFNAME={self.interface} GLOO_SOCKET_IFNAME={self.interface}\n"
        address = hosts[0].name.rpartition("@")[2]
        torchrun = ["python", "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
        torchrun += ["--nproc-per-node", str(processes)]
        if self.max_restarts:
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{self.port}"]
            torchrun += ["--rdzv-id", job.name, "--rdzv-conf", f"is_host={int(rank == 0)}"]
            torchrun += ["--max-restarts", str(self.max_restarts)]
        else:
            torchrun += ["--node-rank", str(rank), "--master-addr", address, "--master-port", str(self.port)]
        return NODE.substitute(
            name=job.name,
            host=hosts[rank].name,
            rank=rank,
            nodes=len(hosts),
            processes=processes,
            es="es" if processes > 1 else "",
            head=head(job, self.setup),
            threads=threads(processes),
            environment=environment,
            folder=words(str(folder)),
            # torchrun numbers its agents as they come; the table of rows is by this rank
            command=words(*torchrun, "-m", "terakoya", *job.arguments, "--node-rank", str(rank)),
        )


def _rows(job: Job, hosts: list[Host]) -> list[int]:
    """The rows of each host.

    Raises:
        UserError: with a table that fits.
    """
    if len(job.batch_size) != len(hosts):
        total = sum(job.batch_size.values())
        share, rest = divmod(total, len(hosts))
        if len(hosts) == 1:
            fitting = f'"-1": {total}'
        else:
            fitting = ", ".join(f'"{rank}": {share + (rank < rest)}' for rank in range(len(hosts)))
        raise UserError(
            f"launch hosts: {len(hosts)} host{'s' if len(hosts) > 1 else ''}, but batch_size is for "
            f"{len(job.batch_size)}; a table that keeps the global batch of {total}: {{{fitting}}}"
        )
    return (
        list(job.batch_size.values())
        if "-1" in job.batch_size
        else [job.batch_size[str(rank)] for rank in range(len(hosts))]
    )


def _stop(folder: Path, rank: int) -> str:
    """A line for the host of `rank` that asks its processes to save and leave."""
    return f"kill -TERM $(cat {words(str(folder / f'node-{rank}.pid'))})"


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `hosts`."""
    return {"hosts": Hosts}
