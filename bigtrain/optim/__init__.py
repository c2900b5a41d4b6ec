"""The optimizer: which parameters are updated, how, and with which rate.

Open chain.py first: it lists the stages from gradients to updates in order.
optimizers.py builds the base optimizer that a config names, schedules.py the
learning-rate schedules, and patterns.py assigns parameters to rules of the
config by regular expression. main, checkpoints and tools import this package;
it imports settings, lengths, trees and metrics.
"""
