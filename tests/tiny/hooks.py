"""A user's hooks that interrupt runs."""

import os
import pathlib
import signal

import jax
import numpy as np


class Signals:
  """Sends signals to its own process before a step, once.

  Args:
    step: the step.
    names: names of the signals, such as ["SIGTERM"].
    flag: path of a file that is created first; if it exists, nothing is sent.
  """

  def __init__(self, step, names, flag):
    self._step = step
    self._signals = [getattr(signal, name) for name in names]
    self._flag = pathlib.Path(flag)

  def before_step(self, step):
    if step == self._step and not self._flag.exists():
      self._flag.touch()
      for number in self._signals:
        os.kill(os.getpid(), number)


class Fails:
  """Raises an error before a step."""

  def __init__(self, step):
    self._step = step

  def before_step(self, step):
    if step == self._step:
      raise RuntimeError(f"the hook fails before step {step}")


def note(step, row, *, path):
  """A user's function: adds the step to a file."""
  with open(path, "a") as file:
    file.write(f"{step}\n")


class Acts:
  """Asks for something after given steps; adds scalars; counts its steps.

  Args:
    plan: {step: name of a context's method, or a list of it and arguments}.
    scalars_at: steps that add `sum`, the sum of a parameter.
    only: index of the only process that asks; None for all.
  """

  asks = True
  ends = []  # Of all runs of this process.

  def __init__(self, plan=(), scalars_at=(), only=None, *, context):
    self._plan = {int(step): ask for step, ask in dict(plan).items()}
    self._scalars_at = scalars_at
    self._only = only
    self._context = context
    self._count = 0
    self._sum = jax.jit(lambda params: params["head"]["kernel"].sum())

  def after_step(self, step):
    assert step == self._context.step
    self._count += 1
    if step in self._scalars_at:
      total = self._sum(self._context.state["params"])
      self._context.add_scalars({"sum": total, "count": self._count})
    if self._only in (None, jax.process_index()) and step in self._plan:
      name, *arguments = self._plan[step]
      getattr(self._context, name)(*arguments)

  def after_train(self, step, end):
    self.ends.append((step, end.how, end.reason))

  def state(self):
    return {"count": self._count}

  def restore(self, state):
    self._count = state["count"]


class Values:
  """Adds the loss of each step to the rows."""

  needs_values = True

  def __init__(self, *, context):
    self._context = context
    self.losses = []

  def after_step(self, step):
    self.losses.append(self._context.values["loss_last"])
    self._context.add_scalars({"losses": str(self.losses)})


class Predicts:
  """Adds the loss of the last training batch's shape on zeros to the rows."""

  def __init__(self, *, context):
    self._context = context
    self._logits = jax.jit(context.predict_fns["logits"])
    assert context.config["task"] == "classification"
    assert context.mesh.size == jax.device_count()

  def after_step(self, step):
    image = np.zeros((8, 8, 8, 1), np.float32)
    logits = self._logits(self._context.variables(), {"image": image})
    self._context.add_scalars({"sum": logits.sum()})
