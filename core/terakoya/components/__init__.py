"""The base classes of everything a plugin may bring.

A component is a frozen pydantic model: its fields are the keys of the parameter JSON and hold settings only; what it
builds holds state. torch and transformers are imported inside methods, so that listing plugins stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.components.architecture import WIDTHS, Architecture, Head, Isolation, TensorPartition
from terakoya.components.base import Component
from terakoya.components.formats import Exporter, ForeignParameters, Importer
from terakoya.components.launcher import Job, JobState, Launcher, LaunchPlan, SubmittedJob
from terakoya.components.objective import Batch, Objective, Term
from terakoya.components.optimization import Optimizer, Schedule
from terakoya.components.progress import Progress
from terakoya.components.tokenizer import Encoded, Encoder, Tokenizer
from terakoya.components.tracker import Tracker, TrackerRun
from terakoya.components.vocabulary import Vocabulary

__all__ = [
    "KINDS",
    "WIDTHS",
    "Architecture",
    "Batch",
    "Component",
    "Encoded",
    "Encoder",
    "Exporter",
    "ForeignParameters",
    "Head",
    "Importer",
    "Isolation",
    "Job",
    "JobState",
    "LaunchPlan",
    "Launcher",
    "Objective",
    "Optimizer",
    "Progress",
    "Schedule",
    "SubmittedJob",
    "TensorPartition",
    "Term",
    "Tokenizer",
    "Tracker",
    "TrackerRun",
    "Vocabulary",
]

KINDS: Mapping[str, type[Component]] = {
    "tokenizers": Tokenizer,
    "architectures": Architecture,
    "objectives": Objective,
    "optimizers": Optimizer,
    "schedules": Schedule,
    "exporters": Exporter,
    "importers": Importer,
    "trackers": Tracker,
    "launchers": Launcher,
}
"""Every kind of component, by the plural that its hook `register_<plural>` bears."""
