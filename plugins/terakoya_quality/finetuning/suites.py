"""Suites of tasks: which files, settings and published scores belong to a benchmark, as files that anyone can write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from terakoya.errors import UserError, nearest
from terakoya.json_settings import explain, read_settings
from terakoya_quality.finetuning.kinds import KINDS
from terakoya_quality.finetuning.rows import Row, divide_rows, read_rows
from terakoya_quality.finetuning.settings import TuningSettings

BUNDLED = Path(__file__).with_name("suites")
ENDINGS = (".yaml", ".yml", ".json")
SIMILARITY = "similarity"
"""The kind of task that trains nothing: how alike the texts of a pair are, by the angle between their vectors."""
SetName = Literal["train", "eval", "test"]
ALL = "all"
"""In the place of a set: one file with the examples of all sets, which `shares` divides."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Published(_Part):
    """Scores that others have published."""

    model: str
    """What they measured."""
    set: Literal["eval", "test"]
    """The examples that they measured it on."""
    scores: Mapping[str, float]
    """Name of a score -> its value."""
    source: str
    """A key of the suite's `sources`: where they are published, when, and how they came about."""


class Layout(_Part):
    """The files of a task in one of the forms in which they are published."""

    files: Mapping[SetName | Literal["all"], str]
    """Set -> pattern of the file's name below the data folder, as it is published; also with .gz behind it. `all`: one
    file with all examples, where none is published as divided; then `shares` divides it."""
    shares: Mapping[SetName, float] = Field(default_factory=dict)
    """Set -> its share of the examples of the file `all`. A hash of the example decides, so that sets stay the same."""
    columns: Mapping[str, str] = Field(default_factory=dict)
    """The name that the kind of task has for a column -> the files' own."""
    header: Sequence[str] = ()
    """Names of the columns, for csv and tsv files without a first line of names."""

    @property
    def sets(self) -> set[str]:
        """The sets that the files hold."""
        return set(self.shares) if ALL in self.files else set(self.files)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if (ALL in self.files) != bool(self.shares) or (ALL in self.files and len(self.files) > 1):
            raise ValueError("files: expected a file for each set, or one file `all` and `shares` of the sets")
        if self.shares and (min(self.shares.values()) <= 0 or abs(sum(self.shares.values()) - 1) > 1e-9):
            raise ValueError("shares: expected numbers above 0 that add up to 1")
        return self


class SuiteTask(Layout):
    """A task of a suite."""

    title: str
    """What a reader calls it."""
    task: str
    """The kind of task: that of `finetune --task`, or similarity."""
    layouts: Sequence[Layout] = ()
    """Other forms in which its files are published, for example as parquet on the Hugging Face Hub."""
    scores: Sequence[str] = Field(min_length=1)
    """The scores that are shown."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the fine-tuning that are this task's own."""
    url: str = ""
    """Where its files are published, if not at the suite's address."""
    published: Sequence[Published] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = {name: kind.metrics for name, kind in KINDS.items()} | {SIMILARITY: KINDS["regression"].metrics}
        if self.task not in known:
            raise ValueError(f'task: unknown kind "{self.task}"{nearest(self.task, known)}')
        for score in self.scores:
            if score not in known[self.task]:
                raise ValueError(f'scores: {self.task} has no "{score}"{nearest(score, known[self.task])}')
        missing: set[str] = {"eval"} | ({"train"} if self.task != SIMILARITY else set())
        layouts: tuple[Layout, ...] = (self, *self.layouts)
        for layout in layouts:
            if not missing <= layout.sets:
                got = " and ".join(sorted(layout.sets)) or "none"
                raise ValueError(f"files: expected {' and '.join(sorted(missing, reverse=True))}, got {got}")
        return self


class Suite(_Part):
    """A suite file."""

    name: str
    """What a reader calls the suite."""
    url: str
    """Where its files are published."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the fine-tuning of all tasks."""
    tasks: Mapping[str, SuiteTask] = Field(min_length=1)
    """Name on the command line -> the task."""
    sources: Mapping[str, str] = Field(default_factory=dict)
    """Short name -> where published scores are from."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, task in self.tasks.items():
            for each in task.published:
                if each.source not in self.sources:
                    raise ValueError(f'tasks.{name}.published: "{each.source}" is not among the sources')
        return self


@dataclass(frozen=True)
class ChosenTask:
    """A task that was asked for, with its suite."""

    name: str
    suite: Suite
    task: SuiteTask

    def settings(self, given: Mapping[str, Any]) -> TuningSettings:
        """Returns the suite's settings, with the task's own and those `given`. Raises UserError for unknown ones."""
        merged = {**self.suite.settings, **self.task.settings, **given}
        try:
            return TuningSettings.model_validate(merged)
        except ValidationError as error:
            raise UserError(f"{self.name}: settings: {'; '.join(explain(error, TuningSettings))}") from None


@cache
def read_suite(file: Path) -> Suite:
    """Returns the suite in `file`. Raises UserError that names the key which is wrong."""
    try:
        suite = Suite.model_validate(read_settings(file))
    except ValidationError as error:
        raise UserError(f"{file}: {'; '.join(explain(error, Suite))}") from None
    for name, task in suite.tasks.items():
        ChosenTask(f"{file}: tasks.{name}", suite, task).settings({})
    return suite


def bundled_suites() -> dict[str, Suite]:
    """Returns the suites that come with terakoya, by the names of their files."""
    return {file.stem: read_suite(file) for file in sorted(BUNDLED.glob("*.yaml"))}


def is_suite_task(name: str) -> bool:
    """Returns whether `name` is a suite, a task of a bundled suite, or a suite file, and not a task of lm-eval."""
    suites = bundled_suites()
    return name.endswith(ENDINGS) or name in suites or any(name in suite.tasks for suite in suites.values())


def suggest_suites(names: Iterable[str]) -> str:
    """Returns `; did you mean "jglue"?` if one of `names` is nearly a suite or a task of a bundled suite, else ""."""
    suites = bundled_suites()
    known = {*suites, *(task for suite in suites.values() for task in suite.tasks)}
    return next((near for name in names if "did you mean" in (near := nearest(name, known))), "")


def find_tasks(names: Sequence[str]) -> list[ChosenTask]:
    """Returns the tasks that `names` mean, each once: all of a suite or of a suite file, or one of a bundled suite.

    Raises:
        UserError: there is no such suite or task, or two suite files have tasks of the same name.
    """
    suites = bundled_suites()
    by_name = {name: (suite, task) for suite in suites.values() for name, task in suite.tasks.items()}
    found: dict[str, ChosenTask] = {}
    for name in names:
        suite = read_suite(Path(name)) if name.endswith(ENDINGS) else suites.get(name)
        if suite is not None:
            chosen = [ChosenTask(each, suite, task) for each, task in suite.tasks.items()]
        elif name in by_name:
            chosen = [ChosenTask(name, *by_name[name])]
        else:
            raise UserError(f"--tasks {name}: no such suite or task{nearest(name, {*suites, *by_name})}")
        for each in chosen:
            if each.name in found and found[each.name].task != each.task:
                raise UserError(f"--tasks {name}: another suite has a task {each.name} too; give them in two commands")
            found[each.name] = each
    return list(found.values())


@dataclass(frozen=True)
class FoundFiles:
    """The files of a task, in one of its layouts.

    Attributes:
        paths: set -> file, or `all` -> file; without "test" where that is missing.
    """

    layout: Layout
    paths: Mapping[str, Path]

    def read(self, limit: int | None) -> dict[str, list[Row]]:
        """Returns set -> its rows, at most `limit` of them. Raises UserError as `read_rows`."""
        read = {
            name: read_rows(
                file, columns=self.layout.columns, header=self.layout.header, limit=None if name == ALL else limit
            )
            for name, file in self.paths.items()
        }
        if ALL not in read:
            return read
        divided = divide_rows(read[ALL], {str(name): share for name, share in self.layout.shares.items()})
        for name, rows in divided.items():
            if not rows:
                raise UserError(f"{self.paths[ALL]}: expected examples for {name}, found too few to divide")
        return {name: rows[:limit] for name, rows in divided.items()}


def find_files(chosen: ChosenTask, data: Path) -> FoundFiles:
    """Returns the files of a task below the folder `data`, or one folder below it, in the first layout that is there.

    Raises:
        UserError: files are missing in every layout, or a pattern fits several.
    """
    missing = []
    for layout in (chosen.task, *chosen.task.layouts):
        paths = {name: _find_file(chosen, data, pattern) for name, pattern in layout.files.items()}
        lacking = [layout.files[name] for name, path in paths.items() if path is None and name != "test"]
        if not lacking:
            return FoundFiles(layout, {name: path for name, path in paths.items() if path is not None})
        missing.append(" and ".join(lacking))
    raise UserError(
        f"{data}: {chosen.task.title}: expected {', or '.join(missing)} (also with .gz), found no such file; "
        f"published at {chosen.task.url or chosen.suite.url}"
    )


def _find_file(chosen: ChosenTask, data: Path, pattern: str) -> Path | None:
    """Returns the one file below `data` that fits `pattern`, None where there is none; UserError for several."""
    patterns = [f"{prefix}{pattern}{ending}" for prefix in ("", "*/") for ending in ("", ".gz")]
    matches = sorted({file for each in patterns for file in data.glob(each) if file.is_file()})
    if len(matches) > 1:
        raise UserError(
            f"{data}: {chosen.task.title}: expected one file {pattern}, found {len(matches)}: "
            f"{', '.join(str(file.relative_to(data)) for file in matches)}; keep one, or name its folder"
        )
    return matches[0] if matches else None
