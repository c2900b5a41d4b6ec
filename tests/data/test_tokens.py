"""Windows of token ids, from the files of several programs."""

import numpy as np
import pytest
from support import token_corpora
from support.token_corpora import DOCUMENTS, EOS, IDS

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import tokens


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read_all(source):
  batch = source.read(np.arange(len(source)))
  assert {k: (v.dtype, v.shape[1:]) for k, v in batch.items()} == source.spec
  return batch


def real(batch):
  return batch["segments" if "segments" in batch else "loss_mask"] > 0


@pytest.mark.parametrize("name", token_corpora.FORMATS)
def test_all_formats_give_the_same_windows(tmp_path, name):
  write, options = token_corpora.FORMATS[name]
  path = write(tmp_path)
  batch = read_all(tokens.Source(4, path, **options))
  assert batch["targets"][real(batch)].tolist() == IDS.tolist()
  before = np.append(EOS, IDS[:-1])
  assert batch["tokens"][real(batch)].tolist() == before.tolist()
  apart = read_all(tokens.Source(4, path, cross_documents=False, **options))
  targets = [
    row[mask].tolist() for row, mask in zip(apart["targets"], real(apart))
  ]
  assert targets == [
    document[i : i + 4]
    for document in DOCUMENTS
    for i in range(0, len(document), 4)
  ]


def check_segments(batch):
  """Checks that segments are contiguous; returns their tokens and targets."""
  runs = []
  for row in range(len(batch["tokens"])):
    segments = batch["segments"][row]
    for number in range(1, segments.max() + 1):
      at = segments == number
      assert at.any() and np.diff(np.flatnonzero(at)).max(initial=1) == 1
      positions = batch["positions"][row][at]
      assert positions.tolist() == list(range(at.sum()))
      runs.append(
        (batch["tokens"][row][at].tolist(), batch["targets"][row][at].tolist())
      )
    padding = segments == 0
    assert not batch["tokens"][row][padding].any()
    assert not batch["positions"][row][padding].any()
  return runs


@pytest.mark.parametrize(
  "write", [token_corpora.tokenized, token_corpora.plain]
)
def test_packed_documents(tmp_path, write):
  options = {} if write is token_corpora.tokenized else dict(eos_id=EOS)
  path = write(tmp_path)
  batch = read_all(tokens.Source(6, path, packing=True, **options))
  runs = check_segments(batch)
  expected = []
  for document in DOCUMENTS:
    context = [EOS, *document[:-1]]
    for i in range(0, len(document), 6):
      expected.append((context[i : i + 6], document[i : i + 6]))
  assert sorted(runs) == sorted(expected)
  # The best packing: 6, 6, 4 + 2, and 2.
  assert sorted(real(batch).sum(axis=1)) == [2, 6, 6, 6]


def test_segments_number_the_documents_of_a_window(tmp_path):
  path = token_corpora.tokenized(tmp_path)
  plain_windows = read_all(tokens.Source(5, path))
  batch = read_all(tokens.Source(5, path, segments=True))
  for name in ("tokens", "targets"):
    assert np.array_equal(batch[name], plain_windows[name])
  check_segments(batch)
  assert batch["segments"][1].tolist() == [1, 2, 2, 0, 0]
  assert batch["targets"][1].tolist() == [EOS, 6, EOS, 0, 0]


def test_without_eos_id_the_first_token_of_a_document_is_only_context(tmp_path):
  path = token_corpora.megatron(tmp_path)
  batch = read_all(tokens.Source(6, path))
  assert batch["targets"][real(batch)].tolist() == IDS[1:].tolist()
  for options in (dict(packing=True), dict(segments=True)):
    batch = read_all(tokens.Source(6, path, **options))
    pairs = [pair for run in check_segments(batch) for pair in zip(*run)]
    expected = [pair for d in DOCUMENTS for pair in zip(d[:-1], d[1:])]
    assert sorted(pairs) == sorted(expected)
    assert batch["targets"].max() == EOS


def test_begin_tokens_in_the_data_are_the_first_context(tmp_path):
  batch = read_all(
    tokens.Source(6, token_corpora.tokenized(tmp_path, bos_id=1), packing=True)
  )
  assert real(batch).sum() == len(IDS) - len(DOCUMENTS)


def test_num_bytes_sums_to_the_bytes_in_the_manifest(tmp_path):
  path = token_corpora.tokenized(tmp_path)
  batch = read_all(tokens.Source(6, path))
  np.testing.assert_allclose(batch["num_bytes"].sum(), 50, rtol=1e-6)
  assert "num_bytes" not in tokens.Source(6, token_corpora.plain(tmp_path)).spec


def test_stride_last_and_slice(tmp_path):
  path = token_corpora.plain(tmp_path)
  every = tokens.Source(4, path, stride=1)
  assert len(every) == len(IDS) - 4
  assert np.array_equal(read_all(every)["tokens"][:, 0], IDS[: len(every)])
  full = tokens.Source(4, path, last="drop")
  assert len(full) == (len(IDS) - 1) // 4 and "loss_mask" not in full.spec
  part = tokens.Source(4, path, slice="[1:3]")
  whole = tokens.Source(4, path)
  assert np.array_equal(
    read_all(part)["tokens"], read_all(whole)["tokens"][1:3]
  )
  assert part.where(0) == whole.where(1) == f"{path}, token 5"
  assert part.fingerprint() != whole.fingerprint()


def test_options_that_differ_from_the_manifest_are_errors(
  tmp_path,
):
  path = token_corpora.tokenized(tmp_path)
  assert tokens.Source(4, path).vocab_sizes == {"tokens": 259, "targets": 259}
  for options, message in (
    (dict(tokenizer="bytes"), "made with another tokenizer"),
    (dict(vocab_size=300), "vocab_size=300: expected 259"),
    (dict(eos_id=3), "eos_id=3: expected 9"),
  ):
    with pytest.raises(ConfigError, match=message):
      tokens.Source(4, path, **options)
  with pytest.raises(ConfigError, match="cannot be checked"):
    tokens.Source(4, token_corpora.plain(tmp_path), tokenizer="bytes")


def test_the_error_for_ids_beyond_the_vocabulary_names_the_position(
  tmp_path,
):
  path = token_corpora.plain(tmp_path)
  source = tokens.Source(4, path, vocab_size=EOS)
  with pytest.raises(DataError, match=r"x\.bin, token 5.*id 9.*has 9"):
    source.read(np.asarray([0, 1]))


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(dtype="float32"), "dtype: unknown 'float32'.*uint8"),
    (dict(packing=True), "eos_id"),
    (dict(cross_documents=False, packing=True), "one document each"),
    (dict(cross_documents=False, last="drop", eos_id=EOS), "whole documents"),
    (dict(length=100, last="drop"), "contains no window of 100"),
  ],
)
def test_mistakes(tmp_path, options, message):
  with pytest.raises(ConfigError, match=message):
    tokens.Source(
      **{"length": 4, "path": token_corpora.plain(tmp_path), **options}
    )
