"""`terakoya prepare --engine datatrove`: a store that datatrove's executors make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from terakoya.errors import UserError, import_extra

if TYPE_CHECKING:
    from terakoya.preparation.options import PrepareOptions
    from terakoya.store.token_store import StoreFacts

Engine = Literal["processes", "datatrove"]
Executor = Literal["local", "slurm", "ray"]


def prepare(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    engine: Annotated[
        Engine, typer.Option(help="What runs the work: terakoya's own processes, or datatrove.")
    ] = "processes",
    executor: Annotated[
        Executor | None, typer.Option(help="datatrove's executor. Default: local.", show_default=False)
    ] = None,
    executor_settings: Annotated[
        Path | None, typer.Option(help="A JSON file with arguments of datatrove's executor.", show_default=False)
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="One of these arguments, such as partition=cpu; may be repeated."
        ),
    ] = None,
) -> None:
    """Makes the store with datatrove where `--engine` says so."""
    if engine == "datatrove":
        from terakoya.commands.prepare import announce, show

        options = arguments["options"]
        announce(options)
        facts = _run_datatrove(options, executor or "local", executor_settings, set or ())
        if facts is not None:
            show(options, facts)
    elif executor or executor_settings or set:
        raise UserError("--executor, --executor-settings, --set: expected --engine datatrove with them")
    else:
        verb(**arguments)


def _run_datatrove(
    options: PrepareOptions, executor: Executor, settings_file: Path | None, overrides: Sequence[str]
) -> StoreFacts | None:
    """Makes the store with `executor` and returns its facts; or prints the submitted jobs and returns None."""
    from terakoya.json_settings import apply_overrides, read_settings
    from terakoya.log import console
    from terakoya.preparation.prepare import create_job
    from terakoya_clusters.preparation.datatrove_settings import executor_settings

    import_extra("datatrove", "datatrove", "--engine datatrove")
    from terakoya_clusters.preparation.datatrove import SubmittedJobs, prepare_with_datatrove

    settings = apply_overrides(read_settings(settings_file) if settings_file is not None else {}, overrides)
    executor_settings(executor, settings)  # before the corpus is read
    result = prepare_with_datatrove(create_job(options), executor=executor, settings=settings)
    if not isinstance(result, SubmittedJobs):
        return result
    encoding = f"job {result.encode} encodes, job" if result.encode is not None else "every part exists, job"
    store = options.out / "store.json"
    text = f"submitted: {encoding} {result.join} then joins; {options.out} is finished when there is {store}"
    console().print(text, soft_wrap=True, markup=False)
    return None
