"""Launcher for Amazon SageMaker: the request of a training job, and the script that its instances run."""
