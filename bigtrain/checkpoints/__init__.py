"""Checkpoints: saving the train state, and the state that a run starts with.

Open three modules to learn where an array comes from: start.py decides between
the workdir's newest checkpoint, config.resume, config.model_init and the seed;
restore.py loads a checkpoint under any mesh; warm_start.py maps the names of
another model's file to the parameters, foreign_state.py those of its optimizer,
and foreign/ opens its files. To learn how an array is saved, begin with
checkpointer.py, and manifest.py for the files. The main program, evaluations,
hooks and tools may import this package; models, tasks, data and losses may not.
"""
