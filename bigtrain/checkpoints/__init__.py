"""Checkpoints: saving the train state, and the state that a run starts with.

How an array is saved: checkpointer.py has one save from start to end. It uses
snapshot.py (copies to the host), integrity.py (writes and checks files),
manifest.py (the layout in files) and folders.py (names, commit and removal).
local_checkpoints.py keeps more frequent checkpoints on the hosts.

Where an array comes from: start.py chooses between the workdir's newest
checkpoint, config.resume, config.model_init and the seed. restore.py loads a
checkpoint under any mesh, warm_start.py loads parameters from another model's
file, foreign_state.py loads an optimizer state from one, and foreign/ opens the
files.

The main program, evaluations, hooks and tools may import this package; models,
tasks, data and losses may not.
"""
