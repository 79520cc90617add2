"""Contrastive learning: two views of a document are alike, and unlike the views of all others."""

from terakoya_plugins.objectives.contrastive.objective import Contrastive as Contrastive
from terakoya_plugins.objectives.contrastive.objective import register_objectives as register_objectives
