"""The options of `terakoya evaluate --tasks`, filled in by the command line or by `terakoya.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terakoya_evaluation.options import EvaluateOptions

if TYPE_CHECKING:
    from terakoya_quality.finetuning.search import Watch


def _watch_nothing(title: str) -> AbstractContextManager[Watch]:
    from terakoya_quality.finetuning.search import Callbacks

    return nullcontext(Callbacks())


@dataclass(frozen=True, kw_only=True)
class TaskOptions(EvaluateOptions):
    """What is measured of which model, and how.

    Attributes:
        tasks: names of lm-eval's tasks; or suites, their tasks and suite files, for which the model is fine-tuned; or
            benchmarks of mteb and their tasks, see `embedding.BENCHMARKS`.
        tuning: settings of the fine-tuning that replace those of the suites.
        watch: (title of a task) -> who follows its trainings; by default nobody.
    """

    tasks: Sequence[str] = ()
    tuning: Mapping[str, Any] | None = None
    watch: Callable[[str], AbstractContextManager[Watch]] = _watch_nothing

    @property
    def tuned(self) -> dict[str, Any]:
        """Option of the command line -> its value, of the settings in `tuning`."""
        return {
            f"--{name.replace('learning_rates', 'learning_rate').replace('_', '-')}": value
            for name, value in (self.tuning or {}).items()
        }
