"""The optimizer: which parameters are updated, how, and at which rate.

Open chain.py first: it has the stages from gradients to updates, in order.
recipe.py reads the config (with patterns.py and schedules.py), optimizers.py
builds the base optimizer that it names, by_array.py maps it over layers,
wrappers.py adds a wrapper around it, moments.py stores its moments in bfloat16,
several.py joins several optimizers, and ema.py averages the parameters.
views.py says what the dimensions of a parameter mean. main, checkpoints,
objective and tools import this package; it imports arrays, config and sharding.
"""
