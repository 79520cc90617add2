"""Launchers that submit jobs to the schedulers and services of clusters."""
