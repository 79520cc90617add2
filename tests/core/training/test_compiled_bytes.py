"""What the compiler's kernels for a block read and write on a GPU, as it plans them without one."""

from pathlib import Path
from types import ModuleType
from typing import Any

import fake_cuda
import fake_cuda_cases
import pytest
import toy

pytestmark = pytest.mark.skipif(
    fake_cuda_cases.torch_version() != "2.13", reason="each version of torch plans other kernels"
)
N, H = 32 * 32, 64
"""Positions and width of the small block."""


@pytest.fixture
def fake_compiler() -> ModuleType:
    import fake_compiler  # with torch's compiler, which other tests need not wait for

    return fake_compiler


def products(n: int, h: int) -> int:
    """Bytes of a block's products, written out: operands and results in bf16, gradients of weights in float32."""
    joined = n * h + 3 * h * h + 3 * h + 3 * n * h
    forward = joined + (n * h + h * h + h + n * h) + 2 * (n * h + 4 * h * h + 4 * n * h) + 4 * h + h
    plain = (n * h + h * h + n * h) + (n * h + 4 * h * h + 4 * n * h)
    added_up = 3 * n * h + 3 * h * h + 2 * n * h + (4 * n * h + 4 * h * h + 2 * n * h)
    of_states = plain + added_up
    of_weights = 4 * n * h + 2 * 3 * h * h + (2 * n * h + 2 * h * h) + 2 * (5 * n * h + 2 * 4 * h * h)
    return 2 * (forward + of_states + of_weights)


@pytest.mark.nightly
def test_a_compiled_block_adds_gradients_up_outside_of_its_products(fake_compiler: Any, tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "store", documents=50, seed=1)
    parameters = fake_cuda_cases.bert(store, layers=1, width=H, length=32, autocast=False)
    cases: dict[str, Any] = {"stream": {"parameters": parameters, "vocabulary": None}}
    plan = fake_compiler.take(cases, fake_cuda.compile_guard(tmp_path), tmp_path / "run")["stream"]["plan"]
    # an `addmm` that adds to a matrix would be a copy more, in bytes and in kernels
    assert plan[fake_compiler.PRODUCTS] == {"bytes": products(N, H), "kernels": 12}
    assert plan[fake_compiler.ATTENTION]["kernels"] == 2
    # forward and backward: one kernel each, of 2 and of 3 tensors, and the sums of 64 groups of rows
    assert plan[fake_compiler.GELU] == {"bytes": 2 * 5 * 4 * N * H + 64 * 4 * H * 4, "kernels": 2}


@pytest.mark.nightly
def test_the_compiled_step_of_bert_base_is_as_documented(fake_compiler: Any, tmp_path: Path) -> None:
    found = fake_compiler.table(fake_compiler.base(tmp_path))
    columns = [found[f"{name}, {how}"] for how in ("uncompiled", "compiled") for name in ("autocast", "stream")]
    page = (Path(__file__).parents[3] / "docs" / "design" / "bf16-stream.md").read_text()
    rows = {
        line.split("|")[1].strip(): [each.strip() for each in line.split("|")[2:-1]]
        for line in page.splitlines()
        if line.startswith("| ")
    }
    assert rows["all of the 12 blocks"] == [f"{each['blocks'][0]:.1f}" for each in columns]
    assert rows["whole step"] == [f"{each['step'][0]:.1f}" for each in columns]
    assert rows["kernels"] == [f"{each['step'][1]:,.0f}" for each in columns]
    assert products(16384, 768) * 12 / 1e9 == pytest.approx(found["stream, compiled"]["blocks: products"][0], rel=1e-9)
