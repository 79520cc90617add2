"""Reading settings, as JSON with comments or as YAML: duplicate keys and secrets are refused, the command line
overrides values, errors name the line or the key path."""

from terakoya.json_settings.files import NOTES, read_json, read_settings, read_value, without_notes
from terakoya.json_settings.key_paths import apply_overrides, leaves, looks_secret, origins, refuse_secrets, value_at
from terakoya.json_settings.problems import explain
from terakoya.json_settings.short_json import short_json

__all__ = [
    "NOTES",
    "apply_overrides",
    "explain",
    "leaves",
    "looks_secret",
    "origins",
    "read_json",
    "read_settings",
    "read_value",
    "refuse_secrets",
    "short_json",
    "value_at",
    "without_notes",
]
