"""Paths, velocities, guidance and samplers, where the flow is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.losses import flows


def error(sampler, steps):
  """Error of the flow dz/dt = z - t^2 + 2t, z(0) = 1, whose end is known."""
  with jax.enable_x64(True):
    z = flows.integrate(
      lambda z, t: z - t**2 + 2 * t, jnp.ones((2, 1)), steps, sampler
    )
    # z = t^2 + e^t.
    return float(abs(z[0, 0] - (1 + np.e)))


@pytest.mark.parametrize("sampler, order", [("euler", 1), ("heun", 2)])
def test_the_error_of_a_sampler_falls_with_its_order(sampler, order):
  # Heun's last step is Euler's, so its error of one step stays: h^2.
  ratio = error(sampler, 40) / error(sampler, 80)
  assert ratio == pytest.approx(2**order, rel=0.1)


@pytest.mark.parametrize("sampler, calls", [("euler", 5), ("heun", 9)])
def test_the_steps_of_a_sampler(sampler, calls):
  times = []

  def velocity(z, t):
    times.append(float(t))
    return jnp.ones_like(z)

  with jax.disable_jit():
    z = flows.integrate(velocity, jnp.zeros((1, 1)), 5, sampler)
  assert z == pytest.approx(1, abs=1e-6) and len(times) == calls
  assert times[0] == 0 and times[-1] == pytest.approx(0.8)


def test_a_straight_flow_needs_one_step():
  image, noise = np.random.default_rng(0).normal(size=(2, 3, 4))
  velocity = lambda z, t: flows.velocity_to(image, z, jnp.full(3, t), 1e-3)
  for steps in (1, 7):
    z = flows.integrate(velocity, jnp.asarray(noise), steps, "heun")
    np.testing.assert_allclose(z, image, rtol=0, atol=1e-4)


def test_guidance_within_its_interval():
  with_class, without = (lambda z, t: z + 1), (lambda z, t: z)
  at = lambda interval, t: float(
    flows.guided(with_class, without, 3.0, interval)(jnp.zeros(1), t)[0]
  )
  # v0 + 3 (v1 - v0) inside, v1 outside.
  assert [at((0.1, 0.8), t) for t in (0.0, 0.1, 0.2, 0.8)] == [1, 1, 3, 1]
  assert at((0.0, 1.0), 0.0) == 3
  assert flows.guided(with_class, without, 1.0, (0.0, 1.0)) is with_class


def test_times_are_logit_normal_or_uniform():
  keys = jax.random.split(jax.random.key(0), 20_000)
  t = np.float64(flows.times(keys, "logit_normal", -0.8, 0.8))
  logits = np.log(t / (1 - t))
  assert logits.mean() == pytest.approx(-0.8, abs=0.03)
  assert logits.std() == pytest.approx(0.8, abs=0.03)
  t = np.float64(flows.times(keys, "uniform", 0.0, 1.0))
  assert t.mean() == pytest.approx(0.5, abs=0.01)
  assert t.std() == pytest.approx(12**-0.5, abs=0.01)
