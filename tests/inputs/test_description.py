"""What a run remembers of its data."""

import jax
import numpy as np

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.inputs import pipeline


def describe(data, pp):
  config = settings.Config(
    dict(data=data, pp=pp, batch_size=jax.device_count()), "config.input"
  )
  mesh = sharding.make_mesh()
  return pipeline.make_train(config, seed=0, mesh=mesh).saved["data"]


DIGITS = dict(type="arrays", name="digits", split="train")


def test_class_names_of_a_source():
  pp = "onehot(10,key='label',key_result='labels')|drop('label')"
  saved = describe(DIGITS, pp)
  # Through an op that has no names of its own.
  assert saved["class_names"] == {"labels": [str(i) for i in range(10)]}
  assert saved["raw"]["image"] == ["uint8", [8, 8, 1], 0.0, 16.0]
  assert saved["features"] == {
    "image": ["uint8", [8, 8, 1]],
    "labels": ["float32", [10]],
  }


def test_class_names_of_an_op():
  names = np.asarray([b"owl", b"cat"] * 8)
  data = dict(type="arrays", arrays={"name": names})
  pp = "lookup({'cat':1,'owl':0},key='name',key_result='y')|keep('y')"
  assert describe(data, pp)["class_names"] == {"y": ["owl", "cat"]}


def test_the_tokenizer():
  data = dict(type="digit_pairs", length=16)
  pp = "tokenize(max_len=9)|keep('labels','left')"
  saved = describe(data, pp)
  assert saved["tokenizer"]["name"] == "bytes"
  assert saved["class_names"]["left"][:3] == ["zero", "one", "two"]
