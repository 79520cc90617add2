"""Fully sharded, tensor, pipeline, sequence and context parallelism on plain torch: see docs/design/engines.md."""
