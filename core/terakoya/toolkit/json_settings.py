"""For plugins that read settings files themselves: the reader, values by key path, and a check for secrets."""

from terakoya.json_settings import leaves as leaves
from terakoya.json_settings import read_settings as read_settings
from terakoya.json_settings import refuse_secrets as refuse_secrets
