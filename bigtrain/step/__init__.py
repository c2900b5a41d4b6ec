"""Parts of one step on the device, between its gradients and the next state.

Open guard.py first: it judges each step and keeps bad ones out of the state.
It uses loss_scale.py, for float16, and spikes.py, which finds steps whose loss
is far above the mean. norms.py computes norms for log steps, and
running_metrics.py merges metrics until the next log step. keys.py makes the
random keys of a step, and frozen.py names the variables that no step changes.
main.py combines these in update_fn.
"""
