"""Divergences from teachers: TRL's, over chunks, and from files."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding

from bigtrain.config.errors import ConfigError
from bigtrain.losses import token_divergences
from bigtrain.losses.token_divergences import from_file

pytestmark = pytest.mark.golden

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "golden" / "trl.json").read_text()
)["jsd"]
STUDENT, TEACHER = np.float32(GOLDEN["student"]), np.float32(GOLDEN["teacher"])
MASK = np.float32(GOLDEN["mask"])
V = STUDENT.shape[-1]
TARGETS = np.zeros(MASK.shape, np.int32)


def taught(student, teachers, chunk=None, **options):
  """Mean loss over tokens; the student's hidden states are its logits."""
  losses = token_divergences.taught(lambda x: x, teachers, V, chunk, **options)
  return losses(student, TARGETS, MASK).total / MASK.sum()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=str)
def test_losses_and_gradients_are_those_of_trl(case, chunk):

  def loss(logits):
    student, teacher = logits
    teachers = {"teacher": (teacher, lambda x: x)}
    return taught(student, teachers, chunk, **case["options"])

  @jax.jit
  def run(logits):
    value, (grad, _) = jax.value_and_grad(loss)(logits)
    return {"loss": value, "grad": grad}

  expected = {name: np.asarray(case[name]) for name in ("loss", "grad")}
  rounding.assert_close(run, (STUDENT, TEACHER), expected)


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_a_file_of_all_tokens_is_the_teacher(beta):
  values, ids = jax.lax.top_k(jnp.asarray(TEACHER), V)
  options = dict(beta=beta, temperature=1.5)
  live = {"teacher": (TEACHER, lambda x: x)}
  of_file = {"file": from_file(ids, values, V)}
  want, expected = jax.value_and_grad(taught)(STUDENT, live, **options)
  loss, grad = jax.value_and_grad(taught)(STUDENT, of_file, **options)
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_allclose(grad, expected, atol=1e-7)
  few = from_file(ids[..., :2], values[..., :2], V)
  loss, grad = jax.value_and_grad(taught)(STUDENT, {"file": few}, **options)
  assert np.isfinite(loss) and np.isfinite(grad).all()
  with pytest.raises(ConfigError, match="beta=1: expected less than 1"):
    taught(STUDENT, {"file": few}, beta=1)


def test_several_teachers_have_weights():
  same = lambda x: x
  teachers = {"a": (TEACHER, same), "b": (-TEACHER, same)}
  one = [taught(STUDENT, {n: x}) for n, x in teachers.items()]
  got = taught(STUDENT, teachers, weights=dict(a=0.2, b=3.0), nll=0.5)
  log_p = jax.nn.log_softmax(STUDENT)[..., 0]
  nll = -np.sum(log_p * MASK) / MASK.sum()
  want = 0.2 * one[0] + 3 * one[1] + 0.5 * nll
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_allclose(taught(STUDENT, teachers), np.mean(one), rtol=1e-6)
  with pytest.raises(ConfigError, match="weights of a, b"):
    taught(STUDENT, teachers, weights=dict(a=1.0))
