"""Engines that hold and step one module over several processes: DDP, and what engines of plugins are built from."""
