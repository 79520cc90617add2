"""JSON that a plugin reads itself: its values by key path, and a check that it holds no secrets."""

from terakoya.json_settings import leaves as leaves
from terakoya.json_settings import refuse_secrets as refuse_secrets
