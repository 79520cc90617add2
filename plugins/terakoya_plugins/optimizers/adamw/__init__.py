"""AdamW, with and without bias correction."""

from terakoya_plugins.optimizers.adamw.optimizer import AdamW as AdamW
from terakoya_plugins.optimizers.adamw.optimizer import register_optimizers as register_optimizers
