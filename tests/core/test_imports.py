"""Modules for listing and checking import no torch, so that the command line is quick."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import terakoya
import terakoya.commands
from terakoya.plugins.families import FAMILIES

MODULES = [
    "terakoya.hookspecs",
    "terakoya.components",
    "terakoya.plugins",
    "terakoya.config.parameters",
    "terakoya_pipeline.run",
    "terakoya_pipeline.stages",
    "terakoya.corpus.corpus",
    "terakoya.store.token_store",
    "terakoya.preparation.local",
    "terakoya.rows.row_source",
    "terakoya.toolkit.masking",
    "terakoya.rows.packing",
    "terakoya.rows.loader",
]
PLUGINS = [each.parent.name for each in (Path(terakoya.__file__).parents[2] / "plugins").glob("terakoya_*/__init__.py")]
FUNCTIONS = {
    *terakoya._FUNCTIONS,
    *(name for family in FAMILIES.values() for name, at in family.functions.items() if at.partition(".")[0] in PLUGINS),
}
HEAVY = {"torch", "transformers", "accelerate", "deepspeed"}


def test_commands_and_contracts_import_nothing_heavy() -> None:
    walk = pkgutil.walk_packages(terakoya.commands.__path__, "terakoya.commands.")
    commands = [module.name for module in walk]
    assert "terakoya.commands.main" in commands
    program = (
        f"import importlib, sys\nheavy = {HEAVY}\nfor name in {[*MODULES, *commands]!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert not heavy & sys.modules.keys(), f'{name} imports {heavy & sys.modules.keys()}'\n"
        "import terakoya.plugins; terakoya.plugins.load()\n"
        "import terakoya.commands.main; terakoya.commands.main.build_app()  # the verbs of families, too\n"
        "assert not heavy & sys.modules.keys(), f'loading plugins imports {heavy & sys.modules.keys()}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_functions_of_the_package_do_not_import_the_command_line() -> None:
    program = (
        f"import sys, terakoya\nfor name in {sorted(FUNCTIONS)!r}:\n    getattr(terakoya, name)\n"
        "    loaded = [module for module in ('typer', 'terakoya.commands') if module in sys.modules]\n"
        "    assert not loaded, f'{name} imports {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_module_imports_itself_through_others() -> None:
    """Imports under TYPE_CHECKING count, too."""
    graph = grimp.build_graph("terakoya", "terakoya_tokenizer", *PLUGINS)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while ends := [module for module, imported in imports.items() if not imported & imports.keys()]:
        for module in ends:
            del imports[module]
    assert not imports, f"modules in circles, and what leads to them: {sorted(imports)}"
