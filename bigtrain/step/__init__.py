"""One step on the device, between a batch and the next state.

Open gradients.py first: it computes the gradients of the mean loss over
microbatches. guard.py judges a step and keeps bad ones out of the state,
spikes.py finds steps far above the mean, and running_metrics.py merges metrics
until the next log step. main puts these together in update_fn; reports, tools
and tasks that change the gradients import this package. It imports metrics,
parts, sharding, settings and trees.
"""
