"""Composition of ops: draws, properties and missing features."""

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.pp import parse, registry
from bigtrain.pp.registry import Op


def recording(draws, seen, **properties):
  def fn(features, u):
    seen.append(np.asarray(u).tolist())
    return features

  return Op(fn, draws=draws, **properties)


def test_each_op_gets_its_own_draws_in_order():
  seen = []
  op = registry.compose([recording(n, seen) for n in (2, 0, 1)])
  assert op.draws == 3
  op.fn({}, np.arange(3))
  assert seen[0] == [0, 1] and seen[2] == [2]
  op.fn({}, np.arange(6).reshape(2, 3))
  assert seen[3] == [[0, 1], [3, 4]] and seen[5] == [[2], [5]]


def test_a_composition_supports_what_all_its_ops_support():
  batched = recording(0, [], batched=True)
  tensors = recording(0, [], tensorflow=True)
  neither = recording(0, [])
  assert registry.compose([batched, batched]).batched
  assert not registry.compose([batched, neither]).batched
  assert registry.compose([batched, tensors]).tensorflow
  assert not registry.compose([batched, neither]).tensorflow


def test_composing_nothing_is_the_identity():
  op = registry.compose([])
  assert op.draws == 0 and op.batched and not op.tensorflow
  assert op.fn({"a": 1}, np.zeros(0)) == {"a": 1}


def test_compositions_compose():
  ops = parse.parse("value_range|flip_lr|random_crop(2)|central_crop(1)")
  whole = registry.compose(ops)
  parts = registry.compose(
    [registry.compose(ops[:2]), registry.compose(ops[2:])]
  )
  image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
  u = np.float32([0.1, 0.6, 0.9])
  np.testing.assert_array_equal(
    whole.fn({"image": image}, u)["image"],
    parts.fn({"image": image}, u)["image"],
  )


def test_the_error_of_a_missing_feature_lists_the_available_ones():
  op = registry.compose(parse.parse("keep('image')|flip_lr('imgae')"))
  with pytest.raises(ConfigError) as e:
    op.fn({"image": np.zeros((2, 2, 3)), "label": 1}, np.zeros(1))
  assert str(e.value) == (
    "preprocessing op \"flip_lr('imgae')\" needs the feature 'imgae'; there "
    "are: image."
  )


def test_a_missing_feature_is_an_error_while_the_graph_is_traced():
  import tensorflow as tf

  op = registry.compose(parse.parse("resize(4, key='imgae')"))
  fn = tf.autograph.experimental.do_not_convert(
    lambda image: op.fn({"image": image}, tf.zeros([0]))
  )
  with pytest.raises(ConfigError, match="needs the feature 'imgae'"):
    tf.data.Dataset.from_tensors(tf.zeros([8, 8, 3])).map(fn)
