"""Every check that goes with a component, and a user's plugin from its file on."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from terakoya import plugins
from terakoya.components import KINDS
from terakoya.contract import settings
from terakoya.contract.findings import Check, Finding, NotLookedAt, Wrong, run
from terakoya.errors import UserError
from terakoya.plugins.discovery import PluginError

HEAVY = ("torch", "transformers", "accelerate", "deepspeed")
"""What no plugin may import while it is loaded."""


def problems(plugin: Path | str) -> list[str]:
    """What is wrong with the plugin at `plugin` (a file, a package's folder, a module's name), one sentence each."""
    return [str(finding) for finding in check_plugin(str(plugin)) if finding.verdict == "wrong"]


def check_plugin(plugin: str, *, train: bool = True) -> Iterator[Finding]:
    """The findings of a plugin file, package folder or module name: how it loads, then each component it offers.

    Without `train` no toy run is made. Never raises for what is wrong with the plugin: that is a finding.
    """
    try:
        loaded = plugins.load([plugin])
    except (UserError, PluginError) as error:
        yield Finding(plugin, "It loads, and every hook exists", "wrong", str(error))
        return
    mine = [each for each in loaded.plugins if _belongs(each.name, plugin)]
    if not mine:
        yield Finding(plugin, "It loads, and every hook exists", "wrong", "it is left out by --without")
        return
    yield Finding(plugin, "It loads, and every hook exists")
    for leaving in loaded.leaving:
        if any(leaving.plugin == each.name for each in mine):
            yield Finding(plugin, "No hook of it goes in the next release", "warning", str(leaving))
    yield from run(plugin, (light,), (plugin, [each.module for each in mine]))
    names = {each.name for each in mine}
    for offer in loaded.components():
        if offer.module in names:
            yield from check_component(offer, train=train)


def _belongs(name: str, asked: str) -> bool:
    own = Path(asked).stem if Path(asked).exists() else asked
    return name == own or name.startswith(f"{own}.")


def check_component(offer: plugins.Offer, *, train: bool = True) -> Iterator[Finding]:
    """The findings of one registered component. Without `train` no toy run is made."""
    subject, checks = _subject(offer)
    if train and offer.kind in ("architectures", "objectives", "optimizers", "schedules"):
        from terakoya.contract import training

        checks = [*checks, *training.CHECKS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' own; what matters is a finding
        try:
            yield from run(str(subject), [*settings.CHECKS, *checks], subject)
        finally:
            subject.close()


def _subject(offer: plugins.Offer) -> tuple[settings.Subject, Sequence[Check]]:
    """What to look at, and the looks of its kind."""
    from terakoya.contract import architecture, causal, exporting, objective, parts, seq2seq, tokenizer

    heads = getattr(offer.component, "heads", None)
    further = {"causal": causal.ARCHITECTURE, "seq2seq": seq2seq.CHECKS}
    of_heads = [
        check for head, checks in further.items() if isinstance(heads, frozenset) and head in heads for check in checks
    ]
    kinds: Mapping[str, tuple[type[settings.Subject], Sequence[Check]]] = {
        "architectures": (architecture.Subject, (*architecture.CHECKS, *of_heads, *exporting.CHECKS)),
        "objectives": (objective.Subject, (*objective.CHECKS, *causal.OBJECTIVE)),
        "tokenizers": (tokenizer.Subject, tokenizer.CHECKS),
        "optimizers": (settings.Subject, parts.OPTIMIZER),
        "schedules": (settings.Subject, parts.SCHEDULE),
        "exporters": (settings.Subject, parts.EXPORTER),
    }
    assert offer.kind in KINDS
    make, checks = kinds.get(offer.kind, (settings.Subject, (reaches_out,)))
    return make(offer.kind, offer.name, offer.component), checks


def reaches_out(subject: settings.Subject) -> None:
    """It works with what it reaches."""
    raise NotLookedAt("it reaches out of this machine or needs foreign files; its own test must show that it works")


def light(subject: tuple[str, list[ModuleType]]) -> None:
    """It loads without torch and transformers, so that the command line answers at once."""
    plugin, modules = subject
    program = (
        "import json, sys\nfrom terakoya.plugins import load\nload([sys.argv[1]])\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program, plugin], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Wrong(f"in a fresh process it does not load: {done.stderr.strip().splitlines()[-1]}")
    heavy = json.loads(done.stdout.splitlines()[-1])
    if not heavy:
        return
    lines = [line for module in modules for line in _imports(module, heavy)]
    where = "; ".join(lines) or "through a module that it imports"
    raise Wrong(f"loading it imports {', '.join(heavy)}: {where}. Move that import into the methods that use it")


def _imports(module: ModuleType, heavy: Sequence[str]) -> Iterator[str]:
    """The lines at module level of `module` that import one of `heavy`."""
    file = getattr(module, "__file__", None)
    if file is None:
        return
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] in heavy for name in names):
            yield f"{file}:{node.lineno}"
