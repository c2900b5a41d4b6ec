"""Parts of one step on the device, between its gradients and the next state.

Open guard.py first: it judges a step and keeps bad ones out of the state, with
loss_scale.py and spikes.py, which finds steps far above the mean. norms.py
computes norms in log steps, running_metrics.py merges metrics until the next
log step, keys.py makes the random keys of a step, and frozen.py names the
variables that no step changes. main puts these together in update_fn.
"""
