"""Masked language modelling with whole-word masking, with BERT's next-sentence prediction on request."""

from terakoya_plugins.objectives.masked_lm.objective import MaskedLM as MaskedLM
from terakoya_plugins.objectives.masked_lm.objective import register_objectives as register_objectives
