"""For plugins that read settings files themselves: the reader, and values by key path."""

from terakoya.json_settings import leaves as leaves
from terakoya.json_settings import read_settings as read_settings
