"""A run continues from a checkpoint: its own, or in a new folder another run's.

before_torch.py   refuses what parameters and manifests alone tell, before torch is loaded
resume.py         finds the newest checkpoint of the run, and sets the trainer to its step
changes.py        which parameters may differ there, and which with the user's consent
fork.py           a new run folder that begins at a checkpoint of another run
"""
