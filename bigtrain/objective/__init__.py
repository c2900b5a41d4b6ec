"""What a run learns: its task and model, and all that its gradients need.

Open objective.py first: `Objective`, the one object that main.py passes around.
Its parts, in the order in which it builds them:

  building.py          the task and the model that a config names
    published_sizes.py   the model's sizes, from a published model's folder
    logical_axes.py      names of axes in flax's way
  task_sum.py          several tasks: what each of them sees
    task_schedule.py     which tasks a step has, and their weights
  task_functions.py    a task's loss and predict functions, with their options
  task_state.py        what a task keeps from step to step
  teacher.py           a second model, which is used and never trained
  model_variants.py    fields of the model that each step draws
  initial.py           the first variables, and how they are laid out
  frozen_base.py       the base of adapters
    trained_adapters.py  adapters after training: loaded, merged, exported
  rollouts.py          batches that are made with the weights of the step
    turns.py             answers with tool calls, turn by turn
    shared_rows.py       which process calls judges and tools
    reward_report.py     rewards and answers in log entries
  task_gradients.py    the gradients of a sum of tasks
  gradients.py         gradients of one task over the global batch
    microbatching.py     cutting the batch
    activations.py       statistics of activations in log steps
    sharpness.py         SAM and GSAM

The program, inference and tools import this package.
"""
