"""Text ops give the same on numpy arrays, on batches and in graphs."""

import numpy as np
import pytest
from support import small_tokenizers

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import parse, registry
from bigtrain.text import tokenizers


def objects(values):
  array = np.empty(len(values), object)
  array[:] = values
  return array


def lists(features):
  """Converts lists to arrays of dtype object, as sources return them."""
  return {
    name: objects(value) if isinstance(value, list) else value
    for name, value in features.items()
  }


def on_host(spec, features, u=()):
  op = registry.compose(parse.parse(spec))
  return op.fn(lists(features), np.asarray(u, np.float32))


def on_batch(spec, features, u=()):
  """Runs on a batch of two equal examples; returns the second result."""
  op = registry.compose(parse.parse(spec))
  assert op.batched and not op.tensorflow
  batch = {
    name: objects([value, value]) for name, value in lists(features).items()
  }
  result = op.fn(batch, np.asarray([u, u], np.float32).reshape(2, len(u)))
  return {name: value[1] for name, value in result.items()}


def in_graph(spec, features, u=()):
  import tensorflow as tf

  op = registry.compose(parse.parse(spec))
  fn = tf.autograph.experimental.do_not_convert(
    lambda x: op.fn(x, tf.constant(u, tf.float32, [len(u)]))
  )
  tensors = {
    name: tf.constant(value) for name, value in lists(features).items()
  }
  dataset = tf.data.Dataset.from_tensors(tensors).map(fn)
  (result,) = dataset.as_numpy_iterator()
  return result


EVERYWHERE = (on_host, on_batch, in_graph)


def ids(text, length, eos=True):
  result = [b + 3 for b in text.encode()] + [2] * eos
  return result + [0] * (length - len(result))


def test_the_default_tokenizer_is_bytes():
  for run in EVERYWHERE:
    result = run("tokenize(max_len=8)", {"text": "aü".encode()})
    assert result["labels"].dtype == np.int32
    assert result["labels"].tolist() == ids("aü", 8)
    assert result["text"] == "aü".encode()
  # The sources of users may return Python strings.
  labels = on_host("tokenize(max_len=8)", {"text": "aü"})["labels"]
  assert labels.tolist() == ids("aü", 8)


@pytest.mark.parametrize("run", EVERYWHERE)
@pytest.mark.parametrize(
  "options, text, expected",
  [
    ("eos='none'", "ab", [100, 101, 0, 0]),
    ("eos='none'", "abcdef", [100, 101, 102, 103]),
    ("eos='yes'", "abc", [100, 101, 102, 2]),
    ("eos='yes'", "abcd", [100, 101, 102, 103]),  # Cut, so no end.
    ("eos='sticky'", "abc", [100, 101, 102, 2]),
    ("eos='sticky'", "abcd", [100, 101, 102, 2]),
    ("eos='sticky', bos=True", "abcd", [1, 100, 101, 2]),
    ("eos='yes', bos=True", "ab", [1, 100, 101, 2]),
    ("eos='yes', bos=True", "abc", [1, 100, 101, 102]),
    ("pad=300", "a", [100, 2, 300, 300]),
  ],
)
def test_special_tokens_and_cuts(run, options, text, expected):
  spec = f"tokenize(max_len=4, {options})"
  assert run(spec, {"text": text.encode()})["labels"].tolist() == expected


def test_tokenizers_from_files(tmp_path):
  path = small_tokenizers.sentencepiece_model(tmp_path / "x.model")
  text = "a seven left of a three"
  expected = [*tokenizers.get(path).encode(text), 1, *[0] * 40][:40]
  for run in EVERYWHERE:
    spec = f"tokenize({path!r}, 40, key='caption', key_result='text')"
    result = run(spec, {"caption": text.encode()})
    assert result["text"].tolist() == expected

  path = small_tokenizers.tokenizer_json(tmp_path / "tokenizer.json")
  with pytest.raises(ConfigError, match="has no bos token; leave bos out"):
    parse.parse(f"tokenize({path!r}, bos=True)")
  path = small_tokenizers.sentencepiece_model(
    tmp_path / "y.model", pad_id=-1, eos_id=-1, bos_id=1, unk_id=0
  )
  with pytest.raises(ConfigError, match="no eos token; give eos='none'"):
    parse.parse(f"tokenize({path!r})")
  with pytest.raises(ConfigError, match="no pad token; give pad="):
    parse.parse(f"tokenize({path!r}, eos='none')")
  # An id of text cannot be padding: the text would be lost.
  first = int(tokenizers.get(path).encode("a")[0])
  with pytest.raises(
    DataError, match=f"contains the id {first}, which is padding"
  ):
    on_host(f"tokenize({path!r}, eos='none', pad={first})", {"text": b"a"})


def test_vocabulary_sizes_are_known_in_advance():
  op = registry.compose(
    parse.parse("tokenize|tokenize(key_result='b',pad=999)")
  )
  assert op.vocab_sizes == {"labels": 259, "b": 1000}


BAD = [
  ("tokenize", b"", "cannot use text.*it is empty"),
  ("tokenize", b" \n", r"the text .*n.* has no token"),
  ("tokenize", b"a\xffb", "is not UTF-8, at byte 1"),
  ("lower", b"a\xffb", "is not UTF-8, at byte 1"),
  (
    "tokenize(max_len=9, too_long='error')",
    b"a caption of some length",
    "of 24 tokens has room for 8",
  ),
]


@pytest.mark.parametrize("spec, text, match", BAD)
def test_text_that_cannot_be_used(spec, text, match):
  import tensorflow as tf

  for run in (on_host, on_batch):
    with pytest.raises(DataError, match=match):
      run(spec, {"text": text})
  with pytest.raises(tf.errors.InvalidArgumentError, match=match) as e:
    in_graph(spec, {"text": text})
  assert "Traceback" not in str(e.value)


def test_half_a_surrogate_pair_is_not_text():
  with pytest.raises(DataError, match="not UTF-8"):
    on_host("tokenize", {"text": "a\ud800"})


def test_cuts_are_logged_less_and_less_often(caplog):
  op = registry.compose(parse.parse("tokenize(max_len=3)"))
  texts = objects([b"abcdef"] * 25)
  op.fn({"text": texts}, np.zeros((25, 0), np.float32))
  first, tenth = (r.message for r in caplog.records)
  assert "(1 so far)" in first and "(10 so far)" in tenth
  assert "'abcdef' of 6 tokens has room for 2" in first


@pytest.mark.parametrize("run", [on_host, in_graph])
def test_several_texts_in_an_example(run):
  labels = run("tokenize(max_len=4)", {"text": [b"a", b"bc"]})["labels"]
  assert labels.tolist() == [ids("a", 4), ids("bc", 4)]
  text = run("lower", {"text": [b"A", "Ü".encode()]})["text"]
  assert text.tolist() == [b"a", "ü".encode()]


@pytest.mark.parametrize(
  "text, lower, canonical",
  [
    ("A Cat.", "a cat.", "a cat"),
    ("ÄΣΑΣ İ", "äσας i̇", "äσας i̇"),
    (
      " the_tabby-cat,  (Felis)\n",
      " the_tabby-cat,  (felis)\n",
      "the tabbycat felis",
    ),
    ("", "", ""),
  ],
)
def test_lower_and_canonicalize(text, lower, canonical):
  for run in EVERYWHERE:
    result = run("lower", {"text": text.encode()})
    assert result["text"] == lower.encode()
    spec = "canonicalize(key='text', key_result='c')"
    result = run(spec, {"text": text.encode()})
    assert result["c"] == canonical.encode()
    assert result["text"] == text.encode()


@pytest.mark.parametrize("run", EVERYWHERE)
def test_templates(run):
  features = {"name": "cät".encode(), "n": np.int64(3)}
  result = run("strfmt('{{a {name}, {n} of {n}')", features)
  assert result["text"] == "{a cät, 3 of 3".encode()
  assert run("strfmt('a {name}', 'name')", features)["name"] == "a cät".encode()
  assert run("strfmt('a cat')", features)["text"] == b"a cat"


@pytest.mark.parametrize("run", [on_host, in_graph])
def test_templates_of_lists(run):
  features = {"name": [b"cat", b"dog"], "n": np.int64(3)}
  text = run("strfmt('{n} {name}s')", features)["text"]
  assert text.tolist() == [b"3 cats", b"3 dogs"]


def test_templates_of_a_batch_of_lists():
  features = {
    "name": np.asarray([[b"a", b"b"], [b"c", b"d"]], object),
    "n": np.asarray([1, 2]),
  }
  op = registry.compose(parse.parse("strfmt('{name}{n}')"))
  text = op.fn(features, np.zeros((2, 0), np.float32))["text"]
  assert text.tolist() == [[b"a1", b"b1"], [b"c2", b"d2"]]


@pytest.mark.parametrize("run", EVERYWHERE)
def test_choice_is_uniform_or_a_fixed_index(run):
  captions = [b"a", b"bb", b"ccc"]
  drawn = [
    run("choice", {"text": captions}, [u])["text"]
    for u in (0, 0.3, 0.34, 0.66, 0.67, np.nextafter(np.float32(1), 0))
  ]
  assert drawn == [b"a", b"a", b"bb", b"bb", b"ccc", b"ccc"]
  result = run("choice('text', 'one', index=1)", {"text": captions})
  assert result["one"] == b"bb"


def test_each_example_of_a_batch_has_its_own_choice():
  op = registry.compose(parse.parse("choice|tokenize(max_len=3)"))
  u = np.asarray([[0.1], [0.9], [0.9]], np.float32)
  ragged = objects(
    [objects([b"a", b"b"]), objects([b"c"]), objects([b"d", b"e"])]
  )
  assert op.fn({"text": ragged}, u)["text"].tolist() == [b"a", b"c", b"e"]
  regular = np.asarray([[b"a", b"b"], [b"c", b"d"], [b"e", b"f"]], object)
  result = op.fn({"text": regular}, u)
  assert result["text"].tolist() == [b"a", b"d", b"f"]
  assert result["labels"].tolist() == [ids("a", 3), ids("d", 3), ids("f", 3)]


def test_a_choice_from_too_few_is_an_error():
  import tensorflow as tf

  none = np.empty(0, object)
  for spec, texts in (("choice", none), ("choice(index=2)", [b"a", b"b"])):
    u = [0.5] if spec == "choice" else []
    with pytest.raises(DataError, match="too few to choose from in text"):
      on_host(spec, {"text": texts}, u)
    tensor = tf.constant(list(texts), tf.string)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too few to ch"):
      in_graph(spec, {"text": tensor}, u)


@pytest.mark.parametrize("run", EVERYWHERE)
@pytest.mark.parametrize(
  "spec, value, match",
  [
    ("choice", b"a", "expects a list in 'text', got a single value"),
    ("tokenize", np.float32(1), "expects text"),
    ("lower", np.int64(1), "expects text"),
    ("strfmt('{text}')", np.float32(1), "text or integers in 'text', got"),
    ("strfmt('{text}{tex}')", b"a", "needs the feature 'tex'; there are: text"),
  ],
)
def test_features_of_the_wrong_kind_are_refused(run, spec, value, match):
  u = [0.5] if spec == "choice" else []
  with pytest.raises(ConfigError, match=match):
    run(spec, {"text": value}, u)


def test_a_batch_of_lists_is_not_text():
  op = registry.compose(parse.parse("tokenize"))
  ragged = objects([objects([b"a"]), objects([b"b", b"c"])])
  with pytest.raises(ConfigError, match="lists of texts .'choice' takes one"):
    op.fn({"text": ragged}, np.zeros((2, 0), np.float32))


@pytest.mark.parametrize(
  "spec, match",
  [
    ("tokenize('byte')", "1 of 1, .tokenize.*Did you mean 'bytes'"),
    ("tokenize(max_len=1)", "'max_len' is 1, which leaves no room for text"),
    ("tokenize(eos='no')", "argument 'eos' is 'no', expected"),
    ("tokenize(pad=-2)", "'pad': expected a whole number at least -1, got -2"),
    ("tokenize(max_length=3)", "'max_length'. Did you mean 'max_len'"),
    ("choice(index=-1)", "'index': expected a whole number at least 0, got"),
    ("strfmt('{}')", "expected names of features in braces"),
    ("strfmt('{a!r}')", "expected names of features in braces"),
    ("strfmt('{a:>9}')", "expected names of features in braces"),
    ("strfmt('{a')", "argument 'template' is '{a'"),
  ],
)
def test_wrong_arguments_are_named(spec, match):
  with pytest.raises(ConfigError, match=match):
    parse.parse(spec)


def test_templates_do_not_access_attributes():
  with pytest.raises(ConfigError, match="needs the feature 'text.__class__'"):
    on_host("strfmt('{text.__class__}')", {"text": b"a"})
