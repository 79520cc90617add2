"""Plugins: found, loaded, asked for by kind and name, told of a run's events."""

from terakoya.plugins.loading import (
    PLUGINS_VARIABLE as PLUGINS_VARIABLE,
)
from terakoya.plugins.loading import (
    TRACE_VARIABLE as TRACE_VARIABLE,
)
from terakoya.plugins.loading import (
    WITHOUT_VARIABLE as WITHOUT_VARIABLE,
)
from terakoya.plugins.loading import (
    Offer as Offer,
)
from terakoya.plugins.loading import (
    PluginError as PluginError,
)
from terakoya.plugins.loading import (
    Registry as Registry,
)
from terakoya.plugins.loading import (
    _loaded as _loaded,
)
from terakoya.plugins.loading import (
    load as load,
)
from terakoya.plugins.loading import (
    registry as registry,
)
