"""Replaced-token detection (ELECTRA): a generator fills in masked tokens, a discriminator detects replaced tokens."""

from terakoya_plugins.objectives.replaced_token.objective import ReplacedToken as ReplacedToken
from terakoya_plugins.objectives.replaced_token.objective import register_objectives as register_objectives
