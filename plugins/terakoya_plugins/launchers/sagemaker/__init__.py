"""Launcher for Amazon SageMaker: the request of a training job, and the script that its instances run."""

from terakoya_plugins.launchers.sagemaker.launcher import SageMaker as SageMaker
from terakoya_plugins.launchers.sagemaker.launcher import register_launchers as register_launchers
