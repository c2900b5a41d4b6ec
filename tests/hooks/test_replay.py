"""A step that is computed twice, and wrong once."""

import itertools

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec
from tiny import flips

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.objective import gradients
from bigtrain.runtime.hook_context import Corrupt

NAME = "params/first/kernel"


@pytest.fixture(autouse=True)
def flips_again(monkeypatch):
  monkeypatch.setattr(flips.Flips, "flipped", False)


def hooks(policy="stop", **flip):
  result = dict(replay=dict(type="replay", every_steps=2, policy=policy))
  if flip:
    result["flip"] = dict(type="tiny.flips.Flips", **flip)
  return result


@pytest.fixture(scope="module")
def undisturbed(tiny_config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("undisturbed")
  main.train(tiny_config({"mesh": dict(replica=4)}), str(workdir))
  return workdir


@pytest.fixture
def train(tiny_config, tmp_path):
  def call(hooks, **changes):
    changes = {"mesh": dict(replica=4), "hooks": hooks, **changes}
    main.train(tiny_config(changes), str(tmp_path))
    return tmp_path

  return call


def test_a_replay_changes_nothing(train, undisturbed):
  workdir = train(hooks())
  tiny.assert_same(tiny.arrays(workdir), tiny.arrays(undisturbed))


def test_a_flipped_bit_stops_the_run_before_a_save(train, tmp_path):
  flip = dict(step=4, name="mu/first/kernel", device=5, when="after")
  with pytest.raises(Corrupt) as error:
    train(hooks(**flip), ckpt_steps=1)
  message = str(error.value)
  device = jax.local_devices()[5]
  for part in (
    "hook 'replay': step 4, computed twice",
    "mu/first/kernel",
    str(device),
  ):
    assert part in message, message
  assert tiny.checkpoint_steps(tmp_path)[-1] == 3


def test_a_flipped_bit_of_a_metric_is_found(train):
  flip = dict(step=2, name="last/loss_last", device=1, when="tally")
  with pytest.raises(
    Corrupt, match="step 2, .* in .step_metrics/last/loss_last. on .*:1 of"
  ):
    train(hooks(**flip))


def test_a_rollback_ends_bit_equal(train, undisturbed):
  # A wrong copy of a parameter makes wrong gradients on all devices.
  workdir = train(hooks("rollback", step=6, name=NAME))
  assert flips.Flips.flipped
  tiny.assert_same(tiny.arrays(workdir), tiny.arrays(undisturbed))
  assert tiny.rows(workdir) == tiny.rows(undisturbed)


def test_wrong_gradients_of_one_device(train, monkeypatch, tmp_path):
  make = gradients.of_task
  counter = itertools.count(1)

  def wrong(*args, mesh, **kwargs):
    compute = make(*args, mesh=mesh, **kwargs)

    def is_wrong(step):
      return np.int32(step == 3 and next(counter) == 2)

    def call(state, batch):
      grads, pairs, mutable = compute(state, batch)
      number = jax.ShapeDtypeStruct((), np.int32)
      wrong = jax.pure_callback(is_wrong, number, state["step"])

      def of_device(wrong, g):
        index = jax.lax.axis_index("replica")
        return g.at[0].multiply(1.0 + wrong * (index == 2))

      bias = grads["head"]["bias"]
      grads["head"]["bias"] = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
      )(wrong, bias)
      return grads, pairs, mutable

    return call

  monkeypatch.setattr(gradients, "of_task", wrong)
  with pytest.raises(Corrupt, match="step 4, .*head/bias.* on .*:4"):
    train(hooks(), ckpt_steps=2)
  assert tiny.checkpoint_steps(tmp_path) == [2]


def test_mistakes(train):
  for options, message in (
    (dict(every_steps=0), "config.hooks.r.every_steps: expected a whole"),
    (dict(policy="skip"), "config.hooks.r.policy: unknown 'skip'"),
  ):
    with pytest.raises(ConfigError, match=message):
      train(dict(r=dict(type="replay", **options)))
