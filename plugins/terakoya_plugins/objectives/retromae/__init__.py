"""RetroMAE: an encoder whose [CLS] alone must tell a decoder of one layer what the document says."""

from terakoya_plugins.objectives.retromae.objective import RetroMAE as RetroMAE
from terakoya_plugins.objectives.retromae.objective import register_objectives as register_objectives
