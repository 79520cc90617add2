"""Diagnoses whether this machine and this installation can train, and what to do if not."""

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
from terakoya.errors import describe_os_error
from terakoya.plugins import registry
from terakoya_checks import machine as checks
from terakoya_checks.machine import Finding
from terakoya_tokenizer.kernels import load_kernels

DISTRIBUTION = "terakoya"
CHECKED_EXTRA = "deepspeed"


def diagnose(folder: Path) -> list[Finding]:
    """Runs every check, in the order in which a machine is set up. `folder` is where stores and runs will be."""
    import psutil

    def check_memory() -> list[Finding]:
        memory = psutil.virtual_memory()
        return checks.check_memory(available=memory.available, total=memory.total)

    (built_for, available), torch_findings = _check_torch()
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    # not Path.expanduser, which fails where the user has no home folder
    extensions = os.path.expanduser(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions")  # noqa: PTH111
    made: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("versions", check_versions),
        ("torch", lambda: torch_findings),
        ("GPU", lambda: checks.check_gpus(built_for=built_for, available=available, driver=checks.query_nvidia_smi())),
        ("CUDA compiler", lambda: checks.check_compiler(built_for=built_for, deepspeed=has_deepspeed)),
        ("build locks", lambda: checks.check_build_locks(Path(extensions))),
        ("memory", check_memory),
        ("shared memory", checks.check_shared_memory),
        ("disk", lambda: checks.check_disk(folder)),
        ("threads", lambda: checks.check_threads(os.environ, cores=process_pool.available_cores())),
        ("port", checks.check_port),
        ("network", lambda: checks.check_network(os.environ, list(psutil.net_if_addrs()))),
        ("text", lambda: check_text_encoding(sys.getfilesystemencoding(), sys.stdout.encoding)),
        ("dictionaries", check_dictionaries),
        ("C compiler", lambda: check_c_compiler(load_kernels() is not None)),
        ("fastokens", lambda: check_fastokens(importlib.util.find_spec("fastokens") is not None)),
        ("plugins", check_plugins),
    ]
    return [finding for check, run in made for finding in findings_of(check, run)]


def findings_of(check: str, run: Callable[[], list[Finding]]) -> list[Finding]:
    """Returns what `run` finds. An error of the system is a finding, too: the other checks still follow."""
    try:
        return run()
    except OSError as error:
        is_proc = str(error.filename or "").startswith("/proc")
        remedy = "mount it: mount -t proc proc /proc (docker, podman and buildah run do)" if is_proc else ""
        return [Finding(check, "error", describe_os_error(error), remedy)]


def check_versions(
    *,
    requirements: Sequence[str] | None = None,
    python: str | None = None,
    installed: Callable[[str], str] = metadata.version,
) -> list[Finding]:
    """Checks that the versions of Python and of the installed packages are in the ranges of terakoya's metadata."""
    if requirements is None:
        requirements = metadata.requires(DISTRIBUTION) or ()
    if python is None:
        python = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    running = "{}.{}.{}".format(*sys.version_info[:3])
    findings = []
    if not SpecifierSet(python).contains(running):
        remedy = f"create an environment with Python {python}"
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


def _check_torch() -> tuple[tuple[str | None, bool], list[Finding]]:
    """Returns (CUDA version of torch's build, whether it can use a GPU), and an error if torch cannot be imported, or
    what the device of a run multiplies fast and a word on a GPU that is not used."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "install it again: pip install --force-reinstall torch"
        return (None, False), [Finding("torch", "error", f"torch cannot be imported: {error}", remedy)]
    findings = []
    if torch.backends.mps.is_available():
        text = "Apple's GPU (MPS) is not used: losses are added up in float64, which it does not have"
        findings.append(Finding("GPU", "ok", text))
    available = torch.cuda.is_available()
    findings += checks.check_products(torch.device("cuda", 0) if available else torch.device("cpu"))
    return (torch.version.cuda, available), findings


def check_text_encoding(file_names: str, output: str | None) -> list[Finding]:
    """Checks that file names and the terminal can contain Japanese text."""
    for what, encoding in (("file names", file_names), ("the terminal", output or "utf-8")):
        if encoding.lower().replace("-", "").replace("_", "") != "utf8":
            text = f"{what} use {encoding}; Japanese text will fail there"
            return [Finding("text", "error", text, "export LC_ALL=C.UTF-8 PYTHONUTF8=1")]
    return [Finding("text", "ok", "UTF-8")]


def check_dictionaries(names: Sequence[str] = ("unidic_lite", "ipadic", "unidic")) -> list[Finding]:
    """Checks the installed MeCab dictionaries. The first two come with terakoya; unidic is downloaded separately."""
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


def check_c_compiler(compiles: bool) -> list[Finding]:
    """Checks that the loops of MeCab's look-up are compiled."""
    if compiles:
        return [Finding("C compiler", "ok", "MeCab's look-up is compiled")]
    return [
        Finding(
            "C compiler",
            "warning",
            "none works, or the cache folder cannot be written: tokenizers with MeCab take twice as long or more",
            "install one (Debian: apt-get install gcc), or name yours in CC",
        )
    ]


def check_fastokens(installed: bool) -> list[Finding]:
    """Tells which library reads BPE tokenizers."""
    if installed:
        return [Finding("fastokens", "ok", "BPE is read by it where its ids are those of tokenizers")]
    text = "not installed: text becomes ids of BPE several times more slowly, by tokenizers"
    return [Finding("fastokens", "ok", text, f'pip install "{DISTRIBUTION}[fastokens]"')]


def check_plugins() -> list[Finding]:
    """Reports the number of components, and the plugins that cannot be loaded."""
    loaded = registry()
    findings = [Finding("plugins", "ok", f"{len(loaded.components())} components of {len(loaded.plugins)} plugins")]
    for broken in loaded.broken:
        remedy = f"install what the plugin needs, or exclude it: --without {broken.name}"
        findings.append(Finding("plugins", "error", str(broken), remedy))
    return findings
