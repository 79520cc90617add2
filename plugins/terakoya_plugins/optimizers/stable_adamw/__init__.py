"""StableAdamW: AdamW that takes smaller steps where gradients are larger than their second moment expects."""

from terakoya_plugins.optimizers.stable_adamw.optimizer import StableAdamW as StableAdamW
from terakoya_plugins.optimizers.stable_adamw.optimizer import register_optimizers as register_optimizers
