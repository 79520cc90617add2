"""Lion: the sign of an average of gradients updates every weight."""

from terakoya_plugins.optimizers.lion.optimizer import Lion as Lion
from terakoya_plugins.optimizers.lion.optimizer import register_optimizers as register_optimizers
