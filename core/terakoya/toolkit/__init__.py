"""Modules that plugins may use, grouped by kind of plugin. They are as stable as `components`: see
`hookspecs.INTERFACE`."""
