"""Lists of hosts in the formats of DeepSpeed, Megatron-LM and MPI, and as names."""

from pathlib import Path

import pytest

from terakoya.errors import UserError
from terakoya_launch.launchers.hosts.hostfile import Host, read_hosts


def test_files_of_deepspeed_mpi_and_names(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# the cluster\nworker-1 slots=4\n\nme@worker-2:2  # new\n10.0.0.3\n")
    assert read_hosts(str(file)) == [Host("worker-1", 4), Host("me@worker-2", 2), Host("10.0.0.3")]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node-a slots=8\nnode-b slots=8\n", [Host("node-a", 8), Host("node-b", 8)]),  # DeepSpeed, Megatron-LM
        ("n1 slots=4 max_slots=8\nn2 max-slots=2\n", [Host("n1", 4), Host("n2", 2)]),  # Open MPI
        ("n1:4\nn2 : 2\n", [Host("n1", 4), Host("n2", 2)]),  # MPICH
        ("g0001 4 all.q@g0001 UNDEFINED\ng0002 2 gpu.q@g0002 <NULL>\n", [Host("g0001", 4), Host("g0002", 2)]),  # SGE
        ("r1\nr1\nr2\nr2\nr3\n", [Host("r1", 2), Host("r2", 2), Host("r3")]),  # PBS_NODEFILE, SGE_JOB_HOSTLIST
    ],
)
def test_files_that_schedulers_write(text: str, hosts: list[Host], tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text(text)
    assert read_hosts(str(file)) == hosts


def test_the_address_of_a_host_has_no_user() -> None:
    assert [host.address for host in read_hosts("me@a01:2,a02")] == ["a01", "a02"]


def test_names_with_commas() -> None:
    assert read_hosts("a01:4, a02 slots=2,a03") == [Host("a01", 4), Host("a02", 2), Host("a03")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a01:4,a01:2", "a01 is listed twice"),
        ("a01,a01:2", "a01 is listed twice"),
        ("a01:2,a01", "a01 is listed twice"),
        ("a01:0", "a01 has no slots"),
        ("a01 gpus=4", 'expected a name, "name slots=4" or "name:4", got "a01 gpus=4"'),
        ("no/such/file", "no such file"),
        (",", "at least one host"),
        ("-F", 'expected a name, .* got "-F"'),
        ("-oProxyCommand", 'got "-oProxyCommand"'),
        ("me@-F:2", 'got "me@-F:2"'),
        ("-l@a01", 'got "-l@a01"'),
    ],
)
def test_wrong_lists_are_refused(given: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hosts(given)


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("a01 slots=4\na02 slots=four\n")
    with pytest.raises(UserError, match="hostfile, line 2"):
        read_hosts(str(file))
