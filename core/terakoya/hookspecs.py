"""Every hook that a plugin may implement: the whole extension surface on one page.

    from terakoya import hookimpl

    @hookimpl
    def register_architectures():
        return {"my_bert": MyBert}

Registration hooks are called once, when plugins are loaded, in every process. Events are called on every rank, in the
main thread. Events make no collective calls but `run.reduce`, in `evaluate` and, after steps that are logged, in
`step_finished`. The results of all plugins are used, and load order never matters: a name that two plugins register is
an error that names both modules.

A deprecated hook stays on this page for one more release, marked `@hookspec(warn_on_impl=DeprecatedHook("0.3", "use
..."))`. It is called as before, and every start and `terakoya plugins check` warn of each plugin that implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pydantic import BaseModel

    from terakoya import components
    from terakoya.components.record_format import RecordFormat
    from terakoya.components.run import Run, StepReport
    from terakoya.corpus.cleaning import AddCleaning
    from terakoya.places import Place

PROJECT = "terakoya"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's functions as hooks; `from terakoya import hookimpl`."""

INTERFACE = "1.0"
"""The version of the plugin interface: this page, `components` and `toolkit`. The first number rises when plugins must
be changed, the second when something is added."""


class DeprecatedHook(FutureWarning):
    """Marks a hook that the release `version` removes; `instead` says what to do."""

    def __init__(self, version: str, instead: str) -> None:
        super().__init__(f"is removed in terakoya {version}: {instead}")


@dataclass(frozen=True)
class Command:
    """A verb of the command line; `from terakoya import Command`.

    Attributes:
        function: its parameters are the arguments and options, as typer reads them, and its docstring is the help. In
            the place of a parameter that is a dataclass stand those fields of it that are `Annotated` with an option or
            argument of typer; one that is not given has the field's default.
        example: a whole command line, shown at the end of the help.
        after: the verb behind which the list of verbs has this one; "": at the beginning; None: at the end.
        passes_options: whether options that the function does not declare are no error: it finds them in
            `typer.Context.args`.
    """

    function: Callable[..., None]
    example: str
    after: str | None = None
    passes_options: bool = False


@dataclass(frozen=True)
class Group:
    """A group of verbs, which are called by its name and their own: `terakoya store info`.

    Attributes:
        help: what the verbs do.
        after: as of a `Command`.
    """

    help: str
    after: str | None = None


@dataclass(frozen=True)
class Language:
    """A language of the command line besides English; `from terakoya import Language`.

    Attributes:
        translate: a finished text of the program -> the same in the language, or the text itself.
        wrap: a paragraph and a number of columns -> its lines.
        translate_help: translates the help of a command of typer and of those below it, in place.
        explain_usage: an error of typer about arguments -> what it says in the language; None: shown as it is.
    """

    translate: Callable[[str], str]
    wrap: Callable[[str, int], Iterator[str]]
    translate_help: Callable[[Any, Callable[[str], str]], None]
    explain_usage: Callable[[Any], str | None]


# -------------------------------------------------------------------------------------------------- registration


@hookspec
def register_commands() -> Mapping[str, Command | Group]:
    """Called when the command line starts, in every process that reads one, of the modules alone that entry points and
    `--plugin` name: `terakoya --help` imports these and the modules of verbs. Returns verbs by name;
    "store count" is a verb of the group `store`, which another plugin or the core may have."""


@hookspec
def register_options() -> Mapping[str, Callable[..., None]]:
    """Called as `register_commands`, in every process that reads a command line. Returns functions by the name of a
    verb of the core or of another plugin. Such a function is called instead of the verb, and its keyword-only
    parameters are further options of it, as typer reads them: `function(verb, arguments, **options)`, where
    `verb(**arguments)` runs the verb: `arguments["options"]` is the options object of a `verb(options)`."""


@hookspec
def register_languages() -> Mapping[str, Callable[[], Language]]:
    """Called when the command line starts, in every process that reads one, of the same modules. Returns functions that
    load a language, by its name for `TERAKOYA_LANG`."""


@hookspec
def register_places() -> Mapping[str, Callable[[str], Place]]:
    """Called when a user first names a run, a store or a corpus by a scheme such as `s3://bucket/run`, in every process
    that reads it, of the same modules. Returns classes of places by their scheme, "s3"; "*" is the one of all schemes
    that no plugin names. See `terakoya.places.Place`, also for what is not there."""


@hookspec
def register_tokenizers() -> Mapping[str, type[components.Tokenizer]]:
    """Called when plugins load, in every process. Returns tokenizer kinds by their name for `--type`."""


@hookspec
def register_word_finders() -> Mapping[str, type[components.WordFinder]]:
    """Called when plugins load, in every process. Returns word finders by their name for `terakoya prepare --words`."""


@hookspec
def register_cleaning_steps() -> Mapping[str, type[components.CleaningStep]]:
    """Called when plugins load, in every process. Returns cleaning steps by their `type` in the list `clean`."""


@hookspec
def register_architectures() -> Mapping[str, type[components.Architecture]]:
    """Called when plugins load, in every process. Returns architectures by their `architecture.type`."""


@hookspec
def register_objectives() -> Mapping[str, type[components.Objective]]:
    """Called when plugins load, in every process. Returns objectives by their `objective.type`."""


@hookspec
def register_optimizers() -> Mapping[str, type[components.Optimizer]]:
    """Called when plugins load, in every process. Returns optimizers by their `optimizer.type`."""


@hookspec
def register_schedules() -> Mapping[str, type[components.Schedule]]:
    """Called when plugins load, in every process. Returns schedules by their `schedule.type`."""


@hookspec
def register_exporters() -> Mapping[str, type[components.Exporter]]:
    """Called when plugins load, in every process. Returns export formats by their name for `--format`."""


@hookspec
def register_importers() -> Mapping[str, type[components.Importer]]:
    """Called when plugins load, in every process. Returns import formats by their name for `terakoya import`."""


@hookspec
def register_trackers() -> Mapping[str, type[components.Tracker]]:
    """Called when plugins load, in every process. Returns trackers by their `type` in `trackers`."""


@hookspec
def register_events() -> Mapping[str, type[components.EventPlugin]]:
    """Called when plugins load, in every process. Returns event plugins with settings by their key in `events`."""


@hookspec
def register_launchers() -> Mapping[str, type[components.Launcher]]:
    """Called when plugins load, in every process. Returns launchers by their name for `terakoya launch`."""


@hookspec
def register_initializers() -> Mapping[str, type[components.Initializer]]:
    """Called when plugins load, in every process. Returns initializers by their name in `start_from.initializer`."""


@hookspec
def register_settings() -> Mapping[str, type[BaseModel]]:
    """Called when plugins load, in every process. Returns the settings files that options of commands read and that are
    no components, by these words: "prepare --engine mine". `terakoya parameters show` knows their keys."""


@hookspec
def register_engines() -> Mapping[str, Callable[[Any], Any]]:
    """Called when plugins load, in every process. Returns functions that build the engine of a run of several
    processes, by its name in `parallel.engine`; "ddp" is the one of runs whose processes work on the same rows
    (`parallel.tp_size`). Such a function takes a `training.engines.inputs.EngineInputs` and returns a
    `training.engines.engine.Engine`. Where it has an attribute `find_conflicts`, that is called with the parameters of
    each run that takes the engine, and returns sentences about what does not go together, each with what to do."""


@hookspec
def register_initial_weights() -> Mapping[str, Callable[[components.StartModel], Any]]:
    """Called when plugins load, in every process. Returns functions that make the model of a `start_from` folder fit
    the run, by the key of `start_from` that asks for it: "vocabulary", before settings are compared, and "grow", where
    they fit. Such a function returns the Transformers model and a sentence about it, and raises UserError where it
    cannot."""


@hookspec
def register_module_transforms() -> Mapping[str, components.ModuleTransform]:
    """Called when plugins load, in every process. Returns what changes the module of a run between its building and its
    first step, by name: `components.module_transform.STAGES` says when, and what the core itself does there. The name
    may be a value of `precision` that the core has not."""


@hookspec
def read_cleaning(clean: Any, source: str) -> AddCleaning | None:
    """Called when a command is to clean a corpus, in every process that starts such a command. `clean` is a list of
    objects with a `type`, which errors call `source`, or the file that has it. Returns what adds the cleaning to a
    corpus, the first plugin's; None leaves it to another one. A UserError is shown as it is."""


@hookspec
def check_parts(parts: Path) -> None:
    """Called before `terakoya prepare` changes what a store's folder holds, in every process that does. `parts` is the
    folder of its unfinished parts. Returns nothing; raises a UserError, which is shown as it
    is, while something that the plugin started works on it."""


@hookspec
def register_record_formats() -> Mapping[str, Callable[[Any, components.Tokenizer], RecordFormat]]:
    """Called when plugins load, in every process. Returns functions that read the objects of jsonl lines as documents
    that are no plain text, by their word: "conversations" for `terakoya prepare --conversations`. Such a function takes
    the `PrepareOptions` and the tokenizer, and raises UserError where these do not go with it."""


@hookspec
def register_watches() -> Mapping[str, Callable[..., Any]]:
    """Called when plugins load, in every process. Returns functions that build what watches a run. By the key of the
    parameters that asks for it, "profile" or "spikes", what watches its steps: such a function takes a
    `training.run.Run` and its `training.batches.BatchMaker`, and returns a `training.watches.StepTimer` or a
    `training.step_health.StepJudge`. As "ranks" what watches its processes: from a `distributed.topology`'s
    `Topology`, this rank, the timeout in seconds and a text that only these processes share, a
    `distributed.rank_watch.RankWatch`. As "memory" what explains that it ran out: from the parameters, the vocabulary
    and a `DistributedContext`, a context manager, which is open while the run is built and trained."""


# -------------------------------------------------------------------------------------------------------- events


@hookspec
def run_started(run: Run) -> None:
    """Called once on every rank when model, optimizer and data are ready, before the first step. Returns nothing."""


@hookspec
def step_finished(run: Run, report: StepReport) -> None:
    """Called on every rank after each optimizer step. `report` holds the values that the host knows without waiting for
    the device; it has losses on logged steps only. Returns nothing."""


@hookspec
def evaluate(run: Run) -> Mapping[str, float]:
    """Called on every rank whenever the run evaluates, after the built-in validation. Returns name -> number, equal on
    all ranks (use `run.reduce`), added to the validation's record."""


@hookspec
def validation_finished(run: Run, values: components.Validations) -> None:
    """Called on every rank after each validation, with all its numbers, equal on all ranks: metrics by name for each
    validation store, and under "" what `evaluate` returned. Returns nothing."""


@hookspec
def checkpoint_saved(run: Run, folder: Path) -> None:
    """Called on every rank after a checkpoint has its final name `folder`, which contains its step. With
    `checkpoint.async_save` the run has continued beyond that step. Returns nothing."""


@hookspec
def run_finished(run: Run, error: BaseException | None) -> None:
    """Called once on every rank when the run ends. `error` is the exception that ended it early, else None. A run that
    goes back to a checkpoint (`spikes`) ends so, too, with a `RollingBack`, and `run_started` follows with another
    `run`. Returns nothing."""


@hookspec
def run_files(folder: Path) -> Mapping[str, str]:
    """Called on rank 0 when a run that is kept in another place has ended, before the last of `folder` is copied there.
    Returns the texts of files that the run's folder should hold besides, by name, such as a page about the run. A
    plugin that fails is warned of, and the run ends as it would without it."""
