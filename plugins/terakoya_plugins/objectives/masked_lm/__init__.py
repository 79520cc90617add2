"""Masked language modelling with whole-word masking and optionally BERT's next-sentence prediction."""

from terakoya_plugins.objectives.masked_lm.objective import MaskedLM as MaskedLM
from terakoya_plugins.objectives.masked_lm.objective import register_objectives as register_objectives
