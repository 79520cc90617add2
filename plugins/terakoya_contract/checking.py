"""Runs the checks of a registered component, and of every component of a plugin given by its file."""

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
from terakoya.errors import UserError
from terakoya.plugins.discovery import PluginError
from terakoya_contract import settings
from terakoya_contract.results import Check, CheckFailed, CheckResult, CheckSkipped, run_checks

HEAVY = ("torch", "transformers", "accelerate", "deepspeed")
"""Modules that no plugin may import while it is loaded."""


def problems(plugin: Path | str) -> list[str]:
    """The failed checks of `plugin` (a file, a package's folder, a module's name), one sentence each."""
    return [str(result) for result in check_plugin(str(plugin)) if result.status == "failed"]


def check_plugin(plugin: str, *, train: bool = True) -> Iterator[CheckResult]:
    """Checks a plugin file, package folder or module name: first how it loads, then each component it registers.

    Without `train` there is no toy training run. An error in the plugin is a failed check; it is never raised.
    """
    try:
        loaded = plugins.load([plugin])
    except (UserError, PluginError) as error:
        yield CheckResult(plugin, "It loads, and every hook exists", "failed", str(error))
        return
    own_plugins = [each for each in loaded.plugins if _is_of_plugin(each.name, plugin)]
    if not own_plugins:
        yield CheckResult(plugin, "It loads, and every hook exists", "failed", "it is left out by --without")
        return
    yield CheckResult(plugin, "It loads, and every hook exists")
    for leaving in loaded.deprecated_hooks:
        if any(leaving.plugin == each.name for each in own_plugins):
            yield CheckResult(plugin, "It implements no deprecated hook", "warning", str(leaving))
    yield from run_checks(plugin, (check_imports_without_torch,), (plugin, [each.module for each in own_plugins]))
    names = {each.name for each in own_plugins}
    for offer in loaded.components():
        if offer.module in names:
            yield from check_component(offer, train=train)


def _is_of_plugin(name: str, plugin: str) -> bool:
    """Whether `name` is the loaded plugin that the argument `plugin` names, or a module of it."""
    own = Path(plugin).stem if Path(plugin).exists() else plugin
    return name == own or name.startswith(f"{own}.")


def check_component(offer: plugins.Registration, *, train: bool = True) -> Iterator[CheckResult]:
    """Checks one registered component. Without `train` there is no toy training run."""
    case, checks = _case_and_checks(offer)
    if train and offer.kind in ("architectures", "objectives", "optimizers", "schedules"):
        from terakoya_contract import training

        checks = [*checks, *training.CHECKS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from other libraries; problems of the component are results
        try:
            yield from run_checks(str(case), [*settings.CHECKS, *checks], case)
        finally:
            case.close()


def _case_and_checks(offer: plugins.Registration) -> tuple[settings.Case, Sequence[Check]]:
    from terakoya_contract import (
        architecture,
        causal,
        cleaning_step,
        coordinates,
        exporting,
        initializer,
        objective,
        parts,
        phases,
        seq2seq,
        tokenizer,
        word_finder,
    )

    heads = getattr(offer.component, "heads", None)
    by_head = {"causal": causal.ARCHITECTURE, "seq2seq": seq2seq.CHECKS}
    head_checks = [
        check for head, checks in by_head.items() if isinstance(heads, frozenset) and head in heads for check in checks
    ]
    kinds: Mapping[str, tuple[type[settings.Case], Sequence[Check]]] = {
        "architectures": (
            architecture.ArchitectureCase,
            (
                *architecture.CHECKS,
                phases.check_phase_settings,
                coordinates.check_coordinates,
                *head_checks,
                *exporting.CHECKS,
            ),
        ),
        "objectives": (objective.ObjectiveCase, (*objective.CHECKS, *causal.OBJECTIVE)),
        "tokenizers": (tokenizer.TokenizerCase, tokenizer.CHECKS),
        "word_finders": (settings.Case, word_finder.CHECKS),
        "cleaning_steps": (settings.Case, cleaning_step.CHECKS),
        "optimizers": (settings.Case, parts.OPTIMIZER),
        "schedules": (settings.Case, parts.SCHEDULE),
        "exporters": (settings.Case, parts.EXPORTER),
        "initializers": (settings.Case, initializer.CHECKS),
    }
    assert offer.kind in KINDS
    case_type, checks = kinds.get(offer.kind, (settings.Case, (check_external_access,)))
    return case_type(offer.kind, offer.name, offer.component), checks


def check_external_access(case: settings.Case) -> None:
    """It works with the service or the files it is for."""
    raise CheckSkipped("it needs another machine, a service or files of another program; test that in its own test")


def check_imports_without_torch(case: tuple[str, list[ModuleType]]) -> None:
    """It loads without torch and transformers, so that the command line starts fast."""
    plugin, modules = case
    program = (
        "import json, sys\nfrom terakoya.plugins import load\nload([sys.argv[1]])\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program, plugin], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise CheckFailed(f"in a fresh process it does not load: {done.stderr.strip().splitlines()[-1]}")
    heavy = json.loads(done.stdout.splitlines()[-1])
    if not heavy:
        return
    lines = [line for module in modules for line in _find_imports(module, heavy)]
    where = "; ".join(lines) or "through a module that it imports"
    raise CheckFailed(f"loading it imports {', '.join(heavy)}: {where}. Move that import into the methods that use it")


def _find_imports(module: ModuleType, heavy: Sequence[str]) -> Iterator[str]:
    """The lines at module level of `module` that import one of `heavy`, as FILE:LINE."""
    file = getattr(module, "__file__", None)
    if file is None:
        return
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] in heavy for name in names):
            yield f"{file}:{node.lineno}"
