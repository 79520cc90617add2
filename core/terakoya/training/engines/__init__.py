"""Engines that hold and step one module over several processes: DDP, DeepSpeed, and parts of one model."""
