"""For plugins that read JSON themselves: values by key path, and a check for secrets."""

from terakoya.json_settings import leaves as leaves
from terakoya.json_settings import refuse_secrets as refuse_secrets
