"""The optimizer: which parameters are updated, how, and with which rate.

Open chain.py first: it lists the stages from gradients to updates in order.
recipe.py reads the config, optimizers.py builds the base optimizer that it
names, by_array.py maps it over layers, and wrappers.py adds the wrappers around
it. main, checkpoints and tools import this package; it imports settings,
lengths, parts, sharding and trees.
"""
