"""A user's task with a teacher that follows the student, and a centre.

Legend: B batch, C classes.
"""

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.losses import cross_entropy, forward
from bigtrain.tasks import classification

inputs = classification.inputs
predict_fns = classification.predict_fns


def init_state(params, *, teacher_has="all"):
  if teacher_has == "nothing":
    teacher = {}
  elif teacher_has == "others":
    teacher = {"another": params["head"]}
  elif teacher_has == "larger":
    teacher = {
      "head": jax.tree.map(lambda x: jnp.stack([x, x]), params["head"])
    }
  else:
    teacher = params
  return {"teacher": teacher, "centre": jnp.zeros(10)}


def update_state(state, *, params, sums, momentum=0.5, forgets=False):
  follow = lambda t, p: momentum * t + (1 - momentum) * p
  new = {
    "teacher": jax.tree.map(follow, state["teacher"], params),
    "centre": 0.9 * state["centre"] + 0.1 * sums["logits"] / sums["number"],
  }
  return {"centre": new["centre"]} if forgets else new


def loss_fn(variables, batch, rng, *, model, train, state, pull=1.0):
  (logits_BC, _), mutable = forward.apply(
    model, variables, rng, train, **inputs(batch)
  )
  teacher = {**variables, "params": state["teacher"]}
  wanted_BC, _ = model.apply(teacher, **inputs(batch))
  centred_BC = wanted_BC - state["centre"]
  distance_B = jnp.sum(jnp.square(logits_BC - centred_BC), -1)
  xent_B = cross_entropy.softmax_xent(logits_BC, batch["labels"])
  weight_B = metrics.example_weights(batch, logits_BC)
  sums = {"logits": jnp.sum(wanted_BC, 0), "number": jnp.sum(weight_B)}
  return {
    "loss": metrics.pair(xent_B + pull * distance_B, weight_B),
    "distance": metrics.pair(distance_B, weight_B),
  }, {**mutable, "task_sums": sums}
