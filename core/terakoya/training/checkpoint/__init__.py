"""Checkpoints: complete or absent, and readable on any number of processes, whichever wrote them.

How the files divide the work, with the two in `training/` that use them. Manifests, and whether a folder is whole, are
in `runs/checkpoints.py`.

    training/saving.py    when and how a run saves: waiting for each save, or in the background
    checkpoint.py         one checkpoint folder: writes it, its manifest last; prunes old ones
    recovery.py           the newest whole one, from which a run continues; sets damaged ones aside
    state.py              its `state/`: the tensors of model and optimizer, in shards of any layout
    event_tensors.py      its `events/`: what event plugins keep in tensors
    snapshot.py           a copy of this process's shards in host memory, which a background save writes from
    training/resuming/  continues a run: finds its newest checkpoint and sets the trainer to that step
    restoring.py          rebuilds a checkpoint's whole module on the CPU, without a run, for export and evaluation
"""
