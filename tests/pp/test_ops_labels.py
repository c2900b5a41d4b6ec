"""Label ops, on numpy arrays and in graphs."""

import os

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import parse, registry

NO_DRAWS = np.zeros(0, np.float32)


def run(spec, value, u=NO_DRAWS):
  op = registry.compose(parse.parse(spec))
  key = "labels" if spec.startswith("onehot") else "label"
  return op.fn({key: value}, u)[key]


def in_graph(spec, tensor):
  import tensorflow as tf

  op = registry.compose(parse.parse(spec))
  key = "labels" if spec.startswith("onehot") else "label"
  fn = tf.autograph.experimental.do_not_convert(
    lambda x: op.fn({key: x}, tf.zeros([0]))[key]
  )
  dataset = tf.data.Dataset.from_tensors(tensor).repeat(2).map(fn)
  return list(dataset.as_numpy_iterator())


def test_onehot_of_one_label():
  out = run("onehot(4)", np.int64(2))
  assert out.dtype == np.float32 and out.tolist() == [0, 0, 1, 0]
  out = run("onehot(3, on=2, off=-1)", np.int32(0))
  assert out.tolist() == [2, -1, -1]


def test_onehot_of_many_labels_is_multi_hot():
  many = np.array([3, 1, 3, -1])
  assert run("onehot(4)", many).tolist() == [0, 1, 0, 1]
  assert run("onehot(4, multi=False)", many).tolist() == [
    [0, 0, 0, 1],
    [0, 1, 0, 0],
    [0, 0, 0, 1],
    [0, 0, 0, 0],
  ]
  assert run("onehot(4)", np.zeros(0, np.int64)).tolist() == [0, 0, 0, 0]


def test_onehot_distinguishes_a_batch_from_a_list_of_labels():
  labels, u = np.array([3, 1]), np.zeros((2, 0), np.float32)
  out = run("onehot(4)", labels, u)
  assert out.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
  assert run("onehot(4)", labels[:, None], u).tolist() == out.tolist()


def test_onehot_refuses_labels_beyond_the_classes():
  import tensorflow as tf

  with pytest.raises(DataError, match=r"onehot\(4\).*not below 4.*: 4\."):
    run("onehot(4)", np.int64(4))
  with pytest.raises(tf.errors.InvalidArgumentError, match="not below 4"):
    in_graph("onehot(4)", tf.constant(4))


def test_onehot_refuses_labels_that_are_not_integers():
  import tensorflow as tf

  for value in (np.float32(1), b"cat", np.array(["cat"])):
    with pytest.raises(ConfigError, match="expects integer labels"):
      run("onehot(4)", value)
  with pytest.raises(ConfigError, match="expects integer labels"):
    in_graph("onehot(4)", tf.constant("cat"))


@pytest.fixture
def names_file(tmp_path):
  path = tmp_path / "names.txt"
  path.write_text("cat\ndog\nüber\n", encoding="utf-8")
  return str(path)


def test_lookup_of_names_and_integers(names_file):
  for mapping in (names_file, ["cat", "dog", "über"]):
    spec = f"lookup({mapping!r})"
    for value in ("über", "über".encode(), np.str_("über")):
      out = run(spec, value)
      assert out == 2 and out.dtype == np.int64
    several = np.array([b"dog", "über".encode(), b"dog"], object)
    assert run(spec, several).tolist() == [1, 2, 1]
    assert run(spec, np.array([["cat"], ["dog"]])).tolist() == [[0], [1]]
  spec = "lookup({100: 7, -3: 0})"
  assert run(spec, np.int32(100)) == 7
  assert run(spec, np.array([-3, 100])).tolist() == [0, 7]


def test_lookup_in_a_file_with_ids(tmp_path):
  path = tmp_path / "ids.tsv"
  path.write_text("a b\t30\nc\t-1\n")
  spec = f"lookup({str(path)!r}, sep='\\t')"
  assert [run(spec, name) for name in ("a b", "c")] == [30, -1]
  path.write_text("a b\t30\nc\tx\n")
  with pytest.raises(
    ConfigError, match=r"ids.tsv:2: expected name'\\t'id, got"
  ):
    parse.parse(spec)
  path.write_text("a b\t30\nc 4\n")
  with pytest.raises(ConfigError, match=r"ids.tsv:2"):
    parse.parse(spec)


def test_lookup_refuses_a_file_that_is_not_text(tmp_path):
  path = tmp_path / "names"
  path.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(ConfigError, match="cannot read"):
    parse.parse(f"lookup({str(path)!r})")


def test_lookup_expands_home_and_relative_paths(names_file, monkeypatch):
  folder, name = os.path.split(names_file)
  parent = f"../{os.path.basename(folder)}"
  monkeypatch.setenv("HOME", folder)
  monkeypatch.chdir(folder)
  for path in (f"~/{name}", name, f"./{name}", f"{parent}//{name}"):
    assert run(f"lookup({path!r})", "dog") == 1


def test_lookup_in_a_graph(names_file):
  import tensorflow as tf

  out = in_graph(f"lookup({names_file!r})", tf.constant(["dog", "über"]))
  assert [x.tolist() for x in out] == [[1, 2]] * 2
  out = in_graph("lookup({100: 7, -3: -5})", tf.constant(-3, tf.int32))
  assert out == [-5, -5] and out[0].dtype == np.int64


def test_lookup_names_values_without_an_id():
  import tensorflow as tf

  with pytest.raises(DataError, match=r"no id .* for label: b'cow'\."):
    run("lookup(['cat'])", b"cow")
  with pytest.raises(DataError, match=r": 3\."):
    run("lookup({1: 2})", np.array([1, 3]))
  with pytest.raises(tf.errors.InvalidArgumentError, match=r"no id .*cow"):
    in_graph("lookup(['cat'])", tf.constant("cow"))


def test_lookup_refuses_another_kind_of_label_while_tracing():
  import tensorflow as tf

  with pytest.raises(ConfigError, match=r"maps string, but .* is int64"):
    in_graph("lookup(['cat'])", tf.constant(3, tf.int64))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_first_rows_have_a_fixed_shape(rows):
  import tensorflow as tf

  value = np.arange(1, 2 * rows + 1, dtype=np.int32).reshape(rows, 2)
  expected = np.zeros((3, 2), np.int32)
  expected[:rows] = value[:3]
  out = run("first_rows(3, key='label')", value)
  assert out.dtype == np.int32 and out.tolist() == expected.tolist()
  out = in_graph("first_rows(3, key='label')", tf.constant(value))
  assert [x.tolist() for x in out] == [expected.tolist()] * 2


def test_errors_of_first_rows():
  with pytest.raises(ConfigError, match="'number': .* at least 1, got 0"):
    parse.parse("first_rows(0)")
  with pytest.raises(ConfigError, match="expects a list in 'label'"):
    run("first_rows(2, key='label')", np.int32(3))
  with pytest.raises(ConfigError, match="expects a list of numbers"):
    run("first_rows(2, key='label')", np.array([b"a"], object))
