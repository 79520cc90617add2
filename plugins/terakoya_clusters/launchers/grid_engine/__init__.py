"""Launcher for Grid Engine (SGE, UGE, AGE): a job that saves before its time limit and submits the next one."""
