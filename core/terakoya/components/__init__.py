"""The base classes of everything that a plugin may register.

A component is a frozen pydantic model: its fields are the keys of the parameter JSON and hold settings only; the
objects that it builds hold state. torch and transformers are imported inside methods, so that listing plugins stays
quick.

See docs/design/components.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.components.architecture import WIDTHS, Architecture, DocumentMasking, Head, TensorPartition
from terakoya.components.base import Component
from terakoya.components.cleaning_step import CleaningStep
from terakoya.components.event import EventListener, EventPlugin, Validations
from terakoya.components.formats import Exporter, Importer
from terakoya.components.initializer import Initializer, VocabularyChange
from terakoya.components.launcher import Job, JobState, Launcher, LaunchPlan, SubmittedJob
from terakoya.components.module_transform import Copies, ModuleBuild, ModuleTransform
from terakoya.components.objective import Batch, LossTerm, Objective
from terakoya.components.optimization import Optimizer, Schedule
from terakoya.components.progress import Progress
from terakoya.components.start_model import StartModel
from terakoya.components.tensor_shard import TensorShard
from terakoya.components.tokenizer import EncodedDocuments, Encoder, Tokenizer
from terakoya.components.tracker import Tracker, TrackerRun
from terakoya.components.vocabulary import Vocabulary
from terakoya.components.word_finder import FindWords, WordFinder

__all__ = [
    "KINDS",
    "WIDTHS",
    "Architecture",
    "Batch",
    "CleaningStep",
    "Component",
    "Copies",
    "DocumentMasking",
    "EncodedDocuments",
    "Encoder",
    "EventListener",
    "EventPlugin",
    "Exporter",
    "FindWords",
    "Head",
    "Importer",
    "Initializer",
    "Job",
    "JobState",
    "LaunchPlan",
    "Launcher",
    "LossTerm",
    "ModuleBuild",
    "ModuleTransform",
    "Objective",
    "Optimizer",
    "Progress",
    "Schedule",
    "StartModel",
    "SubmittedJob",
    "TensorPartition",
    "TensorShard",
    "Tokenizer",
    "Tracker",
    "TrackerRun",
    "Validations",
    "Vocabulary",
    "VocabularyChange",
    "WordFinder",
]

KINDS: Mapping[str, type[Component]] = {
    "tokenizers": Tokenizer,
    "word_finders": WordFinder,
    "cleaning_steps": CleaningStep,
    "architectures": Architecture,
    "objectives": Objective,
    "optimizers": Optimizer,
    "schedules": Schedule,
    "exporters": Exporter,
    "importers": Importer,
    "trackers": Tracker,
    "events": EventPlugin,
    "launchers": Launcher,
    "initializers": Initializer,
}
"""Plural -> base class, for every kind of component. A plugin registers components in the hook `register_<plural>`."""
