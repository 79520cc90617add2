"""Muon for the matrices of the blocks, AdamW for the rest."""

from terakoya_plugins.optimizers.muon.optimizer import Muon as Muon
from terakoya_plugins.optimizers.muon.optimizer import register_optimizers as register_optimizers
