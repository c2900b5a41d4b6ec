"""What a run learns: its task and model, and all that the gradients need.

Open building.py first: the task and the model that a config names, and the loss
that binds them. initial.py makes the first variables, gradients.py computes a
step's gradients over microbatches, teacher.py and frozen_base.py load variables
that are used and never trained, rollouts.py makes batches with the weights of
the step. The program, inference and tools import this package.
"""
