"""What happens before the first step: processes meet, CUDA graphs are tried, steps are timed."""
