"""Span corruption and prefix-LM, on whole and on packed windows."""

import zlib

import numpy as np
import pytest

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import ops_seq2seq, parse, registry

EOS, FIRST = 1, 999


def run(spec, features, seed=0):
  op = registry.compose(parse.parse(spec))
  rows = len(features["targets"])
  return op.fn(features, hashing.uniforms(seed, 0, np.arange(rows), op.draws))


def window(rows=4, length=40, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(2, 900, (rows, length)).astype(np.int32)


def restored(inputs, targets):
  """Restores the text: fills the spans of the targets into the inputs."""
  spans, now = {}, None
  for token in targets[targets > 0]:
    if token > 900:
      now = spans.setdefault(int(token), [])
    elif token != EOS:
      now.append(int(token))
  text = []
  for token in inputs[inputs > 0]:
    text += spans.pop(int(token)) if token > 900 else [int(token)]
  assert not spans and text[-1] == EOS
  return text[:-1]


@pytest.mark.parametrize("length", [2, 3, 17, 40, 568])
def test_inputs_and_targets_together_hold_the_text(length):
  ids = window(length=length)
  result = run(
    f"span_corruption({length}, sentinel=999)", {"targets": ids, "n": ids}
  )
  assert set(result) == {"inputs", "targets", "n"}
  for text, inputs, targets in zip(ids, result["inputs"], result["targets"]):
    assert restored(inputs, targets) == text.tolist()
    # A full window leaves no padding.
    assert (inputs > 0).all() and (targets > 0).all()
    marks = targets[targets > 900]
    assert marks.tolist() == list(range(999, 999 - len(marks), -1))
    assert inputs[0] <= 900 and inputs[-1] == targets[-1] == EOS
  assert result["inputs"].dtype == np.int32


def test_lengths_match_the_published_recipe():
  spans = ops_seq2seq.Spans.of(568, 0.15, 3.0)
  assert spans == (85, 28)
  assert spans.lengths(568) == (512, 114)


@pytest.mark.parametrize(
  ("density", "mean_span", "noise", "spans"),
  [
    (0.15, 3.0, 3568451918, 4281141684),
    (0.15, 8.0, 3568451918, 4132754825),
    (0.35, 2.5, 1922362168, 2650549562),
    (0.5, 3.0, 2740853208, 1525809663),
  ],
)
def test_the_numbers_are_t5s_at_every_length(density, mean_span, noise, spans):
  """Checksums of num_noise_tokens and num_noise_spans for 2 to 5,000 tokens.

  They were computed by tensorflow 2.21 with the arithmetic of
  random_spans_noise_mask (t5/data/preprocessors.py, commit 0068fa7).
  """
  numbers = [
    ops_seq2seq.Spans.of(n, density, mean_span) for n in range(2, 5001)
  ]
  for column, expected in zip(zip(*numbers), (noise, spans)):
    assert zlib.crc32(np.asarray(column, "<i4").tobytes()) == expected


def test_numbers_that_float64_would_round_otherwise():
  # Golden numbers of T5: round(190 * 0.15) is 28 in float64, 29 in float32.
  for length, expected in (
    (190, (29, 10)),
    (350, (53, 18)),
    (1310, (197, 66)),
    (3390, (509, 170)),
  ):
    assert ops_seq2seq.Spans.of(length, 0.15, 3.0) == expected
    ids = window(1, length)
    spec = f"span_corruption({length}, sentinel=2000, num_sentinels=200)"
    targets = run(spec, {"targets": ids})["targets"]
    assert (targets[0] > 1800).sum() == expected[1]
    assert (targets > 0).sum() == sum(expected) + 1


def test_every_position_is_removed_equally_often():
  ids = np.arange(2, 42, dtype=np.int32)[None].repeat(4000, 0)
  targets = run("span_corruption(40, sentinel=999)", {"targets": ids})[
    "targets"
  ]
  removed = targets[(targets > EOS) & (targets < 900)]
  counts = np.bincount(removed, minlength=42)[2:]
  share = counts / len(ids)
  assert counts.sum() == 6 * len(ids)
  assert share[0] == 0  # The first token is always kept.
  # The density is even away from the ends.
  assert np.ptp(share[8:32]) < 0.04


def test_batches_give_the_same_as_single_examples():
  ids = window(rows=8)
  spec = "span_corruption(40, sentinel=999)"
  op = registry.compose(parse.parse(spec))
  u = hashing.uniforms(3, 1, np.arange(8), op.draws)
  batch = op.fn({"targets": ids}, u)
  for i in range(8):
    one = op.fn({"targets": ids[i]}, u[i])
    for name, value in one.items():
      np.testing.assert_array_equal(value, batch[name][i])
  other = op.fn(
    {"targets": ids}, hashing.uniforms(4, 1, np.arange(8), op.draws)
  )
  assert (other["inputs"] != batch["inputs"]).any()


def packed(sizes, length):
  segments = np.repeat(np.arange(1, len(sizes) + 1), sizes)
  segments = np.pad(segments, (0, length - len(segments)))[None]
  ids = np.where(segments > 0, window(1, length), 0).astype(np.int32)
  return {"targets": ids, "tokens": ids, "segments": segments}


def documents(features, name):
  ids, segments = features[name][0], features[f"{name}_segments"][0]
  positions = features[f"{name}_positions"][0]
  assert not ids[segments == 0].any()
  result = []
  for number in range(1, segments.max() + 1):
    at = segments == number
    assert positions[at].tolist() == list(range(at.sum()))
    result.append(ids[at])
  return result


def test_packed_documents_stay_separate():
  features = packed([20, 1, 12, 2], 40)
  spec = "span_corruption(40, sentinel=999, inputs_length=50, targets_length=20"
  features["num_bytes"] = np.full(1, 40, np.float32)
  result = run(spec + ")", features)
  assert "num_bytes" not in result
  texts = [
    features["targets"][0][features["segments"][0] == n] for n in (1, 3, 4)
  ]  # Documents of a single token are dropped.
  pairs = zip(documents(result, "inputs"), documents(result, "targets"))
  assert [restored(*pair) for pair in pairs] == [t.tolist() for t in texts]
  assert "segments" not in result and "tokens" not in result
  with pytest.raises(DataError, match="larger targets_length"):
    run("span_corruption(40, sentinel=999)", packed([2] * 20, 40))


def test_a_partial_window():
  ids = window(1, 40)
  mask = (np.arange(40) < 9).astype(np.float32)[None]
  features = {"targets": ids * mask.astype(np.int32), "loss_mask": mask}
  result = run("span_corruption(40, sentinel=999)", features)
  assert set(result) == {"inputs", "targets"}
  text = restored(result["inputs"][0], result["targets"][0])
  assert text == ids[0, :9].tolist()


def test_prefix_lm():
  ids = window(2000, 6)
  result = run("prefix_lm(6)", {"targets": ids})
  sizes = (result["inputs"] > 0).sum(axis=1)
  for text, inputs, targets, size in zip(
    ids, result["inputs"], result["targets"], sizes
  ):
    assert inputs[:size].tolist() == text[:size].tolist()
    assert targets[: 7 - size].tolist() == [*text[size:], EOS]
    assert not inputs[size:].any() and not targets[7 - size :].any()
  counts = np.bincount(sizes, minlength=7)
  assert counts[0] == counts[6] == 0
  assert counts[1:6].min() > 330
  features = packed([10, 3, 1, 20], 40)
  result = run("prefix_lm(40)", features)
  for text, inputs, targets in zip(
    (features["targets"][0][features["segments"][0] == n] for n in (1, 2, 4)),
    documents(result, "inputs"),
    documents(result, "targets"),
  ):
    assert [*inputs, *targets] == [*text, EOS]


def test_a_tensorflow_graph_gives_the_same():
  tf = pytest.importorskip("tensorflow")
  features = {k: v[0] for k, v in packed([20, 12], 40).items()}
  for spec in (
    "span_corruption(40, sentinel=999, inputs_length=50, targets_length=20)",
    "prefix_lm(40)",
  ):
    op = registry.compose(parse.parse(spec))
    u = hashing.uniforms(0, 0, np.arange(1), op.draws)[0]
    expected = op.fn(features, u)
    graph = tf.function(tf.autograph.experimental.do_not_convert(op.fn))
    result = graph({k: tf.constant(v) for k, v in features.items()}, u)
    assert {k: v.shape for k, v in result.items()} == {
      k: v.shape for k, v in expected.items()
    }
    for name, value in expected.items():
      np.testing.assert_array_equal(result[name].numpy(), value)


@pytest.mark.parametrize(
  "spec, message",
  [
    ("span_corruption(1)", "length > 1"),
    ("span_corruption(40, density=1.5)", "between 0 and 1"),
    ("span_corruption(40, num_sentinels=1)", "needs 2 sentinels"),
    ("span_corruption(40, inputs_length=20)", "inputs of 37 tokens"),
    ("prefix_lm(1)", "'length': expected a whole number at least 2, got 1"),
  ],
)
def test_errors_name_the_argument(spec, message):
  with pytest.raises(ConfigError, match=message):
    parse.parse(spec)


def test_windows_of_another_length_are_refused():
  with pytest.raises(ConfigError, match="windows of 40 tokens, but length=41"):
    run("prefix_lm(41)", {"targets": window()})
