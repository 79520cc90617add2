"""Engines that hold and step one module over several processes: DDP, FSDP, DeepSpeed, tensor, pipeline, sequence."""
