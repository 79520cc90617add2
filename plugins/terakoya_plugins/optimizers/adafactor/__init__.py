"""Adafactor: second moments as a row and a column for each matrix."""

from terakoya_plugins.optimizers.adafactor.optimizer import Adafactor as Adafactor
from terakoya_plugins.optimizers.adafactor.optimizer import register_optimizers as register_optimizers
