"""Span corruption (T5): sentinels replace spans of the text, and a decoder predicts the spans."""

from terakoya_plugins.objectives.span_corruption.objective import SpanCorruption as SpanCorruption
from terakoya_plugins.objectives.span_corruption.objective import register_objectives as register_objectives
