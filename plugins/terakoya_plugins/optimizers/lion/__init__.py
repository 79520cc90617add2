"""Lion: every weight moves by the sign of an average of gradients."""

from terakoya_plugins.optimizers.lion.optimizer import Lion as Lion
from terakoya_plugins.optimizers.lion.optimizer import register_optimizers as register_optimizers
