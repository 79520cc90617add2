"""Launcher for hosts reached by ssh: one script a host, which starts its processes with torchrun.

Without restarts the hosts need only the first host's address. With restarts torchrun's agents rendezvous there, and all
processes start again from the last checkpoint after one is lost.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.config import batch_table
from terakoya.errors import UserError
from terakoya.toolkit.json_settings import read_settings
from terakoya_launch.launchers.hosts.hostfile import Host, read_hosts
from terakoya_launch.scripts import limit_threads, quote, script_head, with_parameters

NODE = Template("""\
#!/bin/bash
# $name on $host: node $rank of $nodes, $processes process$es
$head$threads${environment}\
echo $$$$ > $folder/node-$rank.pid
exec $command
""")

PARAMETERS = "parameters.json"
"""The parameters among the files of a plan whose host sees none of this machine's."""
MIN_JOIN_SECONDS = 60
"""The shortest time that agents wait for each other: hosts take this long to import torch."""
DEFAULT_RESTARTS = 3
"""How often a run that redistributes the batches of lost nodes restarts, unless `max_restarts` is set."""


class Hosts(Launcher):
    """Settings of a run on hosts."""

    main_setting: ClassVar[str | None] = "hosts"
    test_settings: ClassVar[Mapping[str, Any]] = {"hosts": "a01:4,a02:4"}

    hosts: str
    """A hostfile of DeepSpeed, Megatron-LM, MPI or Grid Engine (`a01 slots=4`, `a01:4`), or names: `a01:4,a02:4`. The
    first host is node 0, to which the others connect."""
    processes: PositiveInt = 1
    """Processes on a host without a number in `hosts`: one for each GPU. Unit: processes."""
    interface: str | None = None
    """The network interface between the processes, such as eth0. Default: the one with the route to the other hosts."""
    port: Annotated[int, Field(ge=1, le=65535)] = 29500
    """A free port of the first host that the other hosts can reach."""
    rendezvous: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}$")] | None = None
    """Where hosts find each other, such as login:29400, so that the first host may be lost like any other; null is the
    first host. There runs `python -m terakoya_launch.rendezvous_store 29400`. Needs `max_restarts`."""
    max_restarts: NonNegativeInt | None = None
    """How often all processes restart after one is lost. Default: 3 if `on_lost_node` is redistribute, else 0."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run first on each host: modules, an environment."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
    """The command to which a host and the command to run there are appended."""

    def nodes(self) -> int:
        return len(read_hosts(self.hosts))

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        if self.rendezvous is not None and not self._restarts(job):
            raise UserError(
                f"launch hosts: rendezvous: {self.rendezvous}: hosts look for each other there after a loss: needs "
                'max_restarts, or "on_lost_node": "redistribute" in the parameters'
            )
        hosts = read_hosts(self.hosts)
        rows = _rows(job, hosts)
        counts = self._counts(hosts)
        for host, count, share in zip(hosts, counts, rows, strict=True):
            if share < count:
                raise UserError(f"launch hosts: {host.name} would split {share} rows among {count} processes")
        files = {}
        if _is_alone(job, hosts):
            job, parameters = with_parameters(job, folder / PARAMETERS)
            files[PARAMETERS] = json.dumps(read_settings(parameters), indent=2, ensure_ascii=False) + "\n"
        # a store that outlives the run remembers under its name that it has ended
        meeting = job.name if self.rendezvous is None else f"{job.name}-{secrets.token_hex(4)}"
        scripts = {
            f"node-{rank}.sh": self._script(job, folder, hosts, counts, rank, meeting) for rank in range(len(hosts))
        }
        table = "\n".join(
            f"  node {rank}: {host.name}, {count} process{'es' if count > 1 else ''}, {share} rows a step"
            for rank, (host, count, share) in enumerate(zip(hosts, counts, rows, strict=True))
        )
        lines = {host.name: quote("bash", str(folder / name)) for host, name in zip(hosts, scripts, strict=True)}
        paste = "\n".join(f"  {host}: {line}" for host, line in lines.items())
        where = f"all hosts must see {folder} and {job.place}; without ssh, run one of these on each:\n{paste}"
        if _is_alone(job, hosts):
            where = f"{hosts[0].name} gets the files of {folder} over ssh, and trains in {job.place}"
        notes = [f"{sum(counts)} processes, {sum(rows)} rows a step:\n{table}", where]
        if self._restarts(job) and len(hosts) > 1:
            notes.append(self._restart_note(job, hosts))
        commands = [f"{self.ssh} {host} {quote(line)}" for host, line in lines.items()]
        if _is_alone(job, hosts):
            unpack = f"{quote('mkdir', '-p', str(folder), str(job.folder))} && {quote('tar', '-C', str(folder), '-x')}"
            pack = quote("tar", "-C", str(folder), "-c", *scripts, PARAMETERS)
            commands = [f"{self.ssh} {hosts[0].name} {quote(f'{unpack} && {lines[hosts[0].name]}')} < <({pack})"]
        return LaunchPlan({**scripts, **files}, commands, notes)

    def check(self, job: Job, folder: Path) -> None:
        from terakoya import log
        from terakoya_launch.host_checks import raise_on_problems, results_table
        from terakoya_launch.launchers.hosts import checks

        hosts = read_hosts(self.hosts)
        names = [host.name for host in hosts]
        answers = checks.check_hosts(
            checks.HostRequest(
                names, self._counts(hosts), ssh=self.ssh, folder=job.folder, port=self.port,
                shared=None if _is_alone(job, hosts) else folder, data_folders=job.data_folders,
                setup=self.setup, interface=self.interface, rendezvous=self.rendezvous,
            )
        )  # fmt: skip
        meeting = self.rendezvous or f"{hosts[0].address}:{self.port}"
        log.console().print(results_table(answers, meeting, is_first=self.rendezvous is None))
        raise_on_problems(answers)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Checks all hosts, starts them together, prints each line with its host's name, and waits for them."""
        from terakoya_launch.launchers.hosts.run_on_hosts import RemoteCommand, run_on_hosts

        self.check(job, folder)
        hosts = read_hosts(self.hosts)

        def pid(rank: int) -> str:
            return quote(str(folder / f"node-{rank}.pid"))

        return run_on_hosts(
            [
                RemoteCommand(
                    host.name,
                    f"exec {command}" if _is_alone(job, hosts) else command,
                    f"{self.ssh} {host.name} {quote(f'kill -TERM $(cat {pid(rank)})')}",
                )
                for rank, (host, command) in enumerate(zip(hosts, plan.commands, strict=True))
            ],
            continue_after_failure=job.on_lost_node == "redistribute",
            first_is_needed=self.rendezvous is None,
        )

    def _counts(self, hosts: Sequence[Host]) -> list[int]:
        return [host.processes or self.processes for host in hosts]

    def _restarts(self, job: Job) -> int:
        if self.max_restarts is not None:
            return self.max_restarts
        return DEFAULT_RESTARTS if job.on_lost_node == "redistribute" else 0

    def _restart_note(self, job: Job, hosts: Sequence[Host]) -> str:
        restarts = self._restarts(job)
        note = f"after losing a process all restart from the last checkpoint, up to {restarts} times"
        if job.on_lost_node == "redistribute":
            but = f", unless it is {hosts[0].name}, the rendezvous host" if self.rendezvous is None else ""
            return f"{note}; after losing a host the others continue{but}"
        return f"{note}; losing a host ends the run, and the same command resumes it"

    def _script(
        self, job: Job, folder: Path, hosts: Sequence[Host], counts: Sequence[int], rank: int, meeting: str
    ) -> str:
        processes = counts[rank]
        return NODE.substitute(
            name=job.name,
            host=hosts[rank].name,
            rank=rank,
            nodes=len(hosts),
            processes=processes,
            es="es" if processes > 1 else "",
            head=script_head(job, self.setup),
            threads=limit_threads(processes),
            environment=self._environment(job, hosts, rank),
            folder=quote(str(folder)),
            # torchrun numbers its agents in the order of joining; batch_size goes by this rank
            command=quote(
                *self._torchrun(job, hosts, processes, rank, meeting),
                "-m",
                "terakoya",
                *job.arguments,
                "--node-rank",
                str(rank),
            ),
        )

    def _environment(self, job: Job, hosts: Sequence[Host], rank: int) -> str:
        lines = [f"export TERAKOYA_HOST={quote(hosts[rank].address)}"]  # the name that batch_size may use
        if self._restarts(job):
            lines.append(
                "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torchrun's store keeps the addresses of dead processes"
            )
        if len(hosts) > 1:
            peer = hosts[1 if rank == 0 else 0].address
            lookup = f"$(python -m terakoya_launch.host_facts --interface {quote(peer)})"
            lines.append(f"interface={quote(self.interface) if self.interface else lookup}")
            lines.append('export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"')
        return "".join(f"{line}\n" for line in lines)

    def _torchrun(self, job: Job, hosts: Sequence[Host], processes: int, rank: int, meeting: str) -> list[str]:
        first, nodes = hosts[0].address, str(len(hosts))
        if not self._restarts(job):
            rendezvous = ["--node-rank", str(rank), "--master-addr", first, "--master-port", str(self.port)]
        else:
            if job.on_lost_node == "redistribute":
                nodes = f"1:{nodes}"
            join_timeout = max(MIN_JOIN_SECONDS, job.timeout_seconds)
            endpoint = self.rendezvous or f"{first}:{self.port}"
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", meeting]
            is_host = int(rank == 0 and self.rendezvous is None)
            rendezvous += ["--rdzv-conf", f"is_host={is_host},join_timeout={join_timeout}"]
            rendezvous += ["--local-addr", hosts[rank].address, "--max-restarts", str(self._restarts(job))]
        return [
            "python",
            "-m",
            "terakoya_launch.torchrun_agent",
            "--nnodes",
            nodes,
            "--nproc-per-node",
            str(processes),
            *rendezvous,
        ]


def _is_alone(job: Job, hosts: Sequence[Host]) -> bool:
    """Whether the run needs no folder that this machine sees: it is mirrored to an address, and trains on one host."""
    return job.kept_in is not None and len(hosts) == 1


def _rows(job: Job, hosts: Sequence[Host]) -> list[int]:
    """Returns the rows of each host. Raises UserError with a table that fits where `batch_size` does not."""
    names = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} ({', '.join(host.address for host in hosts)})"
    rows = batch_table.assign_rows(
        job.batch_size,
        {rank: host.address for rank, host in enumerate(hosts)},
        there=names,
        redistribute=job.on_lost_node == "redistribute",
    )
    return list(rows.values())
