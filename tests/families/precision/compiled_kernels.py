"""The fused kernels as machine code of GPUs that need not be there, and what each takes of a multiprocessor.

`python tests/families/precision/compiled_kernels.py` prints a line for each kernel, GPU and width; it needs
Triton, whose own assembler writes the code.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from terakoya_plugins.optimizers.stable_adamw import kernels as stable_adamw
from terakoya_precision.fused import column_kernels, norm_kernels

GPUS: Mapping[str, int] = {"A100": 80, "H100": 90, "B200": 100}
"""Compute capabilities."""
WIDTHS = (768, 1024, 4096)
"""Those of base and large models, and the widest that is fused."""


@dataclass(frozen=True)
class Usage:
    """What a thread of a kernel takes.

    Attributes:
        registers: of the 255 that it may have.
        spilled: bytes that do not fit into them.
        shared: bytes of shared memory of a program.
        conversions: how often values move from one thread to another between operations.
    """

    registers: int
    spilled: int
    shared: int
    conversions: int


def kernels(width: int) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Yields name, function, types of arguments by name but those of constants, and constants with `num_warps`."""
    low, wide = "*bf16", "*fp32"
    numbers = {"count": "i32", "width": "i32", "threshold": "i32", "scale": "fp32"}
    for dropped in (False, True):
        how = {"has_dropout": dropped, **({} if dropped else {"seed": None})}
        seed = {"seed": "*i64"} if dropped else {}
        forward = dict.fromkeys(("states", "residual", "weight", "bias"), low) | seed
        forward |= {"normed": low, "total": low, "mean": wide, "deviation": wide, **numbers, "eps": "fp32"}
        sizes = norm_kernels.tile(width, *norm_kernels.FORWARD_TILE)
        yield f"sum_norm, dropout {dropped}", norm_kernels.sum_norm_kernel, forward, {**how, **sizes}
        backward = {"gradient": low, "total": low, "mean": wide, "deviation": wide, "weight": low, **seed}
        backward |= {"of_total": low, "of_states": low, "sums": wide, **numbers}
        sizes = norm_kernels.tile(width, *norm_kernels.BACKWARD_TILE)
        yield f"sum_norm_backward, dropout {dropped}", norm_kernels.sum_norm_backward_kernel, backward, {**how, **sizes}
    sizes = {"count": "i32", "width": "i32"}
    for tanh in (False, True):
        types = {"gradient": low, "states": low, "of_states": low, "sums": wide, **sizes}
        constants = {"is_tanh": tanh, **column_kernels.TILE}
        yield f"gelu_backward, tanh {tanh}", column_kernels.gelu_backward_kernel, types, constants
    types = dict.fromkeys(("first_matrix", "second_matrix", "third_matrix", "joined"), low) | {"sums": wide, **sizes}
    types |= dict.fromkeys(("first_stride", "second_stride", "third_stride"), "i32")
    yield "join", column_kernels.join_kernel, types, dict(column_kernels.TILE)
    types = {"parts": wide, "sums": wide, **sizes}
    yield "column_sums", column_kernels.column_sums_kernel, types, dict(column_kernels.SUM_TILE)
    numbers = dict.fromkeys((*stable_adamw.update_kernel.arg_names, "smallest", "learning_rate"), "fp32")
    numbers |= dict.fromkeys(("weights", "gradients", "means", "squares", "steps", "sizes"), "*i64")
    numbers |= dict.fromkeys(("owners", "numbers", "bounds"), "*i32")
    numbers |= {"sums": wide, "rates": wide}
    sizes = {**stable_adamw.TILE, "skips": True}
    yield "square_sums of StableAdamW", stable_adamw.square_sums_kernel, numbers, dict(stable_adamw.TILE)
    numbers["found_inf"] = wide
    yield "update of StableAdamW", stable_adamw.update_kernel, numbers, sizes
    yield "rates of StableAdamW", stable_adamw.rates_kernel, numbers, {**stable_adamw.SUM_TILE, "skips": True}


def compile_kernel(
    function: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int
) -> tuple[bytes, Usage]:
    """Returns the machine code of a kernel, and what it takes."""
    constants = dict(constants)
    warps = constants.pop("num_warps")
    # as at a launch: memory begins at multiples of 16 bytes, and widths are multiples of 16
    types = {name: kind for name, kind in types.items() if name in function.arg_names and name not in constants}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name == "width" or "stride" in name]
    places = {name: (number,) for number, name in enumerate(function.arg_names)}
    source = ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in function.arg_names},
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    said = assembler_says(built.asm["ptx"], capability)
    registers = int(re.findall(r"Used (\d+) registers", said)[0])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return built.asm["cubin"], Usage(
        registers, spilled, built.metadata.shared, built.asm["ttgir"].count("ttg.convert_layout")
    )


def assembler_says(code: str, capability: int) -> str:
    """What the assembler says of `code`, in PTX."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(code)
        architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", str(source), "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> None:
    """Prints a line for each kernel, GPU and width."""
    for width in WIDTHS:
        for name, *kernel in kernels(width):
            for gpu, capability in GPUS.items():
                code, usage = compile_kernel(*kernel, capability)
                sys.stdout.write(
                    f"{name:34} {width:5} {gpu} warps {kernel[-1]['num_warps']:2} {len(code):7,} bytes  "
                    f"registers {usage.registers:3}  spilled {usage.spilled}  shared {usage.shared:6,}  "
                    f"conversions {usage.conversions}\n"
                )


if __name__ == "__main__":
    main()
