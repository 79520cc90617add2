"""The doctor: whether this machine and this installation can train, and what to do where they cannot."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from terakoya import process_pool
from terakoya.doctor import checks as machine
from terakoya.doctor.checks import Finding
from terakoya.plugins import registry

DISTRIBUTION = "terakoya"
CHECKED_EXTRA = "deepspeed"


def diagnose(folder: Path) -> list[Finding]:
    """Every finding, in the order of a machine being set up. `folder` is where stores and runs will lie."""
    import psutil

    (built_for, available), torch = _torch()
    memory = psutil.virtual_memory()
    cores = process_pool.cores()
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    return [
        *versions(),
        *torch,
        *machine.gpus(built_for=built_for, available=available, driver=machine.nvidia_smi()),
        *machine.compiler(built_for=built_for, deepspeed=importlib.util.find_spec("deepspeed") is not None),
        *machine.build_locks(Path(extensions).expanduser()),
        *machine.memory(available=memory.available, total=memory.total),
        *machine.shared_memory(),
        *machine.disk(folder),
        *machine.threads(os.environ, cores=cores),
        *machine.port(),
        *machine.network(os.environ, list(psutil.net_if_addrs())),
        *text_encoding(sys.getfilesystemencoding(), sys.stdout.encoding),
        *dictionaries(),
        *plugins(),
    ]


def versions(
    *,
    requirements: Sequence[str] | None = None,
    python: str | None = None,
    installed: Callable[[str], str] = metadata.version,
) -> list[Finding]:
    """Whether Python and the installed packages lie in the ranges of terakoya's own metadata."""
    if requirements is None:
        requirements = metadata.requires(DISTRIBUTION) or ()
    if python is None:
        python = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    running = "{}.{}.{}".format(*sys.version_info[:3])
    findings = []
    if not SpecifierSet(python).contains(running):
        remedy = f"make an environment with Python {python}"
        findings.append(Finding("versions", "error", f"Python {running}: expected {python}", remedy))
    fitting = [f"Python {running}"]
    for requirement in map(Requirement, requirements):
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if optional and not (requirement.marker and requirement.marker.evaluate({"extra": CHECKED_EXTRA})):
            continue
        name, expected = requirement.name, str(requirement.specifier)
        pip = f'pip install "{name}{expected}"'
        try:
            version = installed(name)
        except metadata.PackageNotFoundError:
            if optional:
                text = f'{name} is not installed; only "parallel": {{"engine": "deepspeed"}} needs it'
                findings.append(Finding("versions", "ok", text, f'pip install "{DISTRIBUTION}[{CHECKED_EXTRA}]"'))
            else:
                findings.append(Finding("versions", "error", f"{name} is not installed: expected {expected}", pip))
            continue
        if requirement.specifier.contains(version, prereleases=True):
            fitting.append(f"{name} {version}")
        else:
            text = f"{name} {version}: expected {expected}"
            findings.append(Finding("versions", "warning" if optional else "error", text, pip))
    return [Finding("versions", "ok", ", ".join(fitting)), *findings]


def _torch() -> tuple[tuple[str | None, bool], list[Finding]]:
    """(CUDA version torch is built for, whether it can use a GPU), and an error if torch does not import."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "install it again: pip install --force-reinstall torch"
        return (None, False), [Finding("torch", "error", f"torch does not import: {error}", remedy)]
    return (torch.version.cuda, torch.cuda.is_available()), []


def text_encoding(file_names: str, output: str | None) -> list[Finding]:
    """Whether Japanese text can be written to file names and to the terminal."""
    for what, encoding in (("file names", file_names), ("the terminal", output or "utf-8")):
        if encoding.lower().replace("-", "").replace("_", "") != "utf8":
            text = f"{what} use {encoding}; Japanese text will fail there"
            return [Finding("text", "error", text, "export LC_ALL=C.UTF-8 PYTHONUTF8=1")]
    return [Finding("text", "ok", "UTF-8")]


def dictionaries(names: Sequence[str] = ("unidic_lite", "ipadic", "unidic")) -> list[Finding]:
    """Which MeCab dictionaries are there. The first two come with terakoya, unidic is downloaded on its own."""
    present, findings = [], []
    for name in names:
        spec = importlib.util.find_spec(name)
        folder = Path(str(spec.origin)).parent if spec and spec.origin else None
        if folder and any((folder / inner / "sys.dic").is_file() for inner in ("dicdir", "")):
            present.append(name)
        elif name == "unidic" and folder:
            text = "unidic is installed, but its dictionary is not downloaded"
            findings.append(Finding("dictionaries", "warning", text, "python -m unidic download"))
        elif name != "unidic":
            remedy = f"pip install {name.replace('_', '-')}"
            findings.append(Finding("dictionaries", "error", f"{name} is missing", remedy))
    return [Finding("dictionaries", "ok", ", ".join(present) or "none"), *findings]


def plugins() -> list[Finding]:
    """How many components are there, and which plugins do not load."""
    loaded = registry()
    findings = [Finding("plugins", "ok", f"{len(loaded.components())} components of {len(loaded.plugins)} plugins")]
    for broken in loaded.broken:
        remedy = f"install what it lacks, or leave it out: --without {broken.name}"
        findings.append(Finding("plugins", "error", str(broken), remedy))
    return findings
