"""The memory of large tensors that one step frees is reused by the next without page faults."""

import platform
import resource
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from terakoya.distributed import cpu_allocator
if sys.argv[1] != "give back":
    assert cpu_allocator.keep_freed_memory()
if sys.argv[1] == "return for once":
    with cpu_allocator.returning_freed_memory():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            torch.ones(48 << 20, dtype=torch.uint8)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    sys.exit()
def step():
    for _ in range(4):
        torch.ones(48 << 20, dtype=torch.uint8)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_page_faults_go_away() -> None:
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True).stdout
        )
        for mode in ("keep", "give back", "return for once")
    }
    # above 32 MiB glibc by default never keeps a tensor: each of the twenty faults all its pages again
    pages = 20 * (48 << 20) // resource.getpagesize()
    assert faults["give back"] > 0.7 * pages
    assert faults["return for once"] > 0.7 * pages
    assert faults["keep"] < 0.5 * faults["give back"]
