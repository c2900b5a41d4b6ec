"""Ops on text: the same on numpy, on batches and in graphs."""

import numpy as np
import pytest
import small_tokenizers

from bigtrain.pp import parse, registry, tokenizers
from bigtrain.settings import ConfigError, DataError


def objects(values):
  array = np.empty(len(values), object)
  array[:] = values
  return array


def lists(features):
  """Lists as the sources give them: arrays of dtype object."""
  return {
    name: objects(value) if isinstance(value, list) else value
    for name, value in features.items()
  }


def on_host(spec, features, u=()):
  op = registry.compose(parse.parse(spec))
  return op.fn(lists(features), np.asarray(u, np.float32))


def on_batch(spec, features, u=()):
  """The example twice, as a batch; returns the second."""
  op = registry.compose(parse.parse(spec))
  assert op.batched and not op.tensorflow
  batch = {
    name: objects([value, value]) for name, value in lists(features).items()
  }
  found = op.fn(batch, np.asarray([u, u], np.float32).reshape(2, len(u)))
  return {name: value[1] for name, value in found.items()}


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
  (found,) = dataset.as_numpy_iterator()
  return found


EVERYWHERE = (on_host, on_batch, in_graph)


def ids(text, length, eos=True):
  found = [b + 3 for b in text.encode()] + [2] * eos
  return found + [0] * (length - len(found))


def test_the_default_is_bytes_up_to_an_end():
  for run in EVERYWHERE:
    found = run("tokenize(max_len=8)", {"text": "aü".encode()})
    assert found["labels"].dtype == np.int32
    assert found["labels"].tolist() == ids("aü", 8)
    assert found["text"] == "aü".encode()
  # Python's strings, as sources of users may have, are text as well.
  found = on_host("tokenize(max_len=8)", {"text": "aü"})["labels"]
  assert found.tolist() == ids("aü", 8)


@pytest.mark.parametrize("run", EVERYWHERE)
@pytest.mark.parametrize(
  "options, text, expected",
  [
    ("eos='none'", "ab", [100, 101, 0, 0]),
    ("eos='none'", "abcdef", [100, 101, 102, 103]),
    ("eos='yes'", "abc", [100, 101, 102, 2]),
    ("eos='yes'", "abcd", [100, 101, 102, 103]),  # Cut: the text goes on.
    ("eos='sticky'", "abc", [100, 101, 102, 2]),
    ("eos='sticky'", "abcd", [100, 101, 102, 2]),
    ("eos='sticky', bos=True", "abcd", [1, 100, 101, 2]),
    ("eos='yes', bos=True", "ab", [1, 100, 101, 2]),
    ("eos='yes', bos=True", "abc", [1, 100, 101, 102]),
    ("pad=300", "a", [100, 2, 300, 300]),
  ],
)
def test_ends_beginnings_and_cuts(run, options, text, expected):
  spec = f"tokenize(max_len=4, {options})"
  assert run(spec, {"text": text.encode()})["labels"].tolist() == expected


def test_tokenizers_of_libraries(tmp_path):
  path = small_tokenizers.sentencepiece_model(tmp_path / "x.model")
  text = "a seven left of a three"
  expected = [*tokenizers.get(path).encode(text), 1, *[0] * 40][:40]
  for run in EVERYWHERE:
    spec = f"tokenize({path!r}, 40, key='caption', key_result='text')"
    found = run(spec, {"caption": text.encode()})
    assert found["text"].tolist() == expected

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
  # An id of text is no padding: it would be lost.
  first = int(tokenizers.get(path).encode("a")[0])
  with pytest.raises(DataError, match=f"has the id {first}, which is padding"):
    on_host(f"tokenize({path!r}, eos='none', pad={first})", {"text": b"a"})


def test_the_largest_id_is_known_in_advance():
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


def test_half_a_surrogate_pair_is_no_text():
  with pytest.raises(DataError, match="not UTF-8"):
    on_host("tokenize", {"text": "a\ud800"})


def test_cuts_are_told_ever_more_rarely(caplog):
  op = registry.compose(parse.parse("tokenize(max_len=3)"))
  texts = objects([b"abcdef"] * 25)
  op.fn({"text": texts}, np.zeros((25, 0), np.float32))
  told = [r.message for r in caplog.records]
  assert len(told) == 2 and "(1 so far)" in told[0] and "(10 so" in told[1]
  assert "'abcdef' of 6 tokens has room for 2" in told[0]


@pytest.mark.parametrize("run", [on_host, in_graph])
def test_many_texts_of_an_example(run):
  found = run("tokenize(max_len=4)", {"text": [b"a", b"bc"]})["labels"]
  assert found.tolist() == [ids("a", 4), ids("bc", 4)]
  found = run("lower", {"text": [b"A", "Ü".encode()]})["text"]
  assert found.tolist() == [b"a", "ü".encode()]


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
def test_cleaning(text, lower, canonical):
  for run in EVERYWHERE:
    found = run("lower", {"text": text.encode()})["text"]
    assert found == lower.encode()
    spec = "canonicalize(key='text', key_result='c')"
    found = run(spec, {"text": text.encode()})
    assert found["c"] == canonical.encode()
    assert found["text"] == text.encode()


@pytest.mark.parametrize("run", EVERYWHERE)
def test_templates(run):
  features = {"name": "cät".encode(), "n": np.int64(3)}
  found = run("strfmt('{{a {name}, {n} of {n}')", features)
  assert found["text"] == "{a cät, 3 of 3".encode()
  assert run("strfmt('a {name}', 'name')", features)["name"] == "a cät".encode()
  assert run("strfmt('a cat')", features)["text"] == b"a cat"


@pytest.mark.parametrize("run", [on_host, in_graph])
def test_templates_of_lists(run):
  features = {"name": [b"cat", b"dog"], "n": np.int64(3)}
  found = run("strfmt('{n} {name}s')", features)["text"]
  assert found.tolist() == [b"3 cats", b"3 dogs"]


def test_templates_of_a_batch_of_lists():
  features = {
    "name": np.asarray([[b"a", b"b"], [b"c", b"d"]], object),
    "n": np.asarray([1, 2]),
  }
  op = registry.compose(parse.parse("strfmt('{name}{n}')"))
  found = op.fn(features, np.zeros((2, 0), np.float32))["text"]
  assert found.tolist() == [[b"a1", b"b1"], [b"c2", b"d2"]]


@pytest.mark.parametrize("run", EVERYWHERE)
def test_choices(run):
  captions = [b"a", b"bb", b"ccc"]
  drawn = [
    run("choice", {"text": captions}, [u])["text"]
    for u in (0, 0.3, 0.34, 0.66, 0.67, np.nextafter(np.float32(1), 0))
  ]
  assert drawn == [b"a", b"a", b"bb", b"bb", b"ccc", b"ccc"]
  found = run("choice('text', 'one', index=1)", {"text": captions})
  assert found["one"] == b"bb"


def test_choices_in_a_batch_are_each_examples_own():
  op = registry.compose(parse.parse("choice|tokenize(max_len=3)"))
  u = np.asarray([[0.1], [0.9], [0.9]], np.float32)
  ragged = objects(
    [objects([b"a", b"b"]), objects([b"c"]), objects([b"d", b"e"])]
  )
  assert op.fn({"text": ragged}, u)["text"].tolist() == [b"a", b"c", b"e"]
  same = np.asarray([[b"a", b"b"], [b"c", b"d"], [b"e", b"f"]], object)
  found = op.fn({"text": same}, u)
  assert found["text"].tolist() == [b"a", b"d", b"f"]
  assert found["labels"].tolist() == [ids("a", 3), ids("d", 3), ids("f", 3)]


def test_nothing_to_choose_from():
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
def test_features_that_are_no_text(run, spec, value, match):
  u = [0.5] if spec == "choice" else []
  with pytest.raises(ConfigError, match=match):
    run(spec, {"text": value}, u)


def test_a_batch_of_lists_is_no_text():
  op = registry.compose(parse.parse("tokenize"))
  ragged = objects([objects([b"a"]), objects([b"b", b"c"])])
  with pytest.raises(ConfigError, match="lists of texts, of which 'choice'"):
    op.fn({"text": ragged}, np.zeros((2, 0), np.float32))


@pytest.mark.parametrize(
  "spec, match",
  [
    ("tokenize('byte')", "1 of 1, .tokenize.*Did you mean 'bytes'"),
    ("tokenize(max_len=1)", "'max_len' is 1, which leaves no room for text"),
    ("tokenize(eos='no')", "argument 'eos' is 'no', expected"),
    ("tokenize(pad=-1)", "'pad' is -1"),
    ("tokenize(max_length=3)", "'max_length'. Did you mean 'max_len'"),
    ("choice(index=-1)", "'index' is -1"),
    ("strfmt('{}')", "expected names of features in braces"),
    ("strfmt('{a!r}')", "expected names of features in braces"),
    ("strfmt('{a:>9}')", "expected names of features in braces"),
    ("strfmt('{a')", "argument 'template' is '{a'"),
  ],
)
def test_arguments_that_are_wrong(spec, match):
  with pytest.raises(ConfigError, match=match):
    parse.parse(spec)


def test_templates_never_look_inside_of_values():
  with pytest.raises(ConfigError, match="needs the feature 'text.__class__'"):
    on_host("strfmt('{text.__class__}')", {"text": b"a"})
