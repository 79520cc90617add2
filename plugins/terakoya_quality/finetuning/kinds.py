"""The kinds of tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terakoya_quality.finetuning.answers import Answers
from terakoya_quality.finetuning.choices import MultipleChoice
from terakoya_quality.finetuning.entities import NamedEntities
from terakoya_quality.finetuning.task import Task
from terakoya_quality.finetuning.texts import Classification, Regression

KINDS: Mapping[str, type[Task[Any]]] = {
    kind.name: kind for kind in (Classification, Regression, MultipleChoice, NamedEntities, Answers)
}
