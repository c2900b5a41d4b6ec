"""Windows of bytes."""

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import text
from bigtrain.text import tokenizers


def read_all(source):
  return source.read(np.arange(len(source)))


def test_every_byte_is_a_target_once_with_the_bytes_before_as_context(tmp_path):
  raw = [b"The first text, ", b"", "and a sécond.".encode()]
  for i, part in enumerate(raw):
    (tmp_path / f"{i}.txt").write_bytes(part)
  source = text.Source(5, str(tmp_path / "*.txt"))
  batch = read_all(source)
  assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
  mask = batch["loss_mask"] == 1
  assert (batch["targets"][mask] - 3).astype(np.uint8).tobytes() == b"".join(
    raw
  )
  assert not batch["targets"][~mask].any() and not batch["tokens"][~mask].any()
  assert batch["num_bytes"].tolist() == mask.sum(axis=1).tolist()
  bytes_tokenizer = tokenizers.get("bytes")
  assert source.vocab_sizes["tokens"] == bytes_tokenizer.vocab_size
  first = batch["tokens"][0]
  assert first[0] == bytes_tokenizer.bos_id
  assert first[1:].tolist() == bytes_tokenizer.encode("The ").tolist()
  # Context continues within a file, but not into the next file.
  assert batch["tokens"][1][0] == batch["targets"][0][-1]
  assert batch["tokens"][4][0] == bytes_tokenizer.bos_id
  assert source.where(5) == f"{tmp_path / '2.txt'}, byte 5"


def test_stride_and_incomplete_windows(tmp_path):
  (tmp_path / "a").write_bytes(bytes(range(10)))
  every = text.Source(4, str(tmp_path / "a"), stride=1)
  targets = read_all(every)["targets"] - 3
  assert targets.tolist() == [list(range(i, i + 4)) for i in range(7)]
  full = text.Source(4, str(tmp_path / "a"), last="drop")
  batch = read_all(full)
  assert len(full) == 2 and "loss_mask" not in batch
  assert set(batch) == set(full.spec)
  assert (batch["targets"] - 3).ravel().tolist() == list(range(8))


def test_short_files_share_windows_with_packing(tmp_path):
  for name, size in (("a", 6), ("b", 3), ("c", 4), ("d", 1)):
    (tmp_path / name).write_text(name * size)
  path = [str(tmp_path / "[ab]"), str(tmp_path / "[cd]")]
  source = text.Source(6, path, packing=True)
  batch = read_all(source)
  assert {k: (v.dtype, v.shape[1:]) for k, v in batch.items()} == source.spec
  by_text = np.lexsort(batch["targets"].T[::-1])
  batch = {name: value[by_text] for name, value in batch.items()}
  rows = (batch["targets"] - 3).tolist()
  a, b, c, d = (ord(x) for x in "abcd")
  assert rows == [[a] * 6, [b] * 3 + [-3] * 3, [c] * 4 + [d, -3]]
  assert batch["segments"].tolist() == [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 0],
    [1, 1, 1, 1, 2, 0],
  ]
  assert batch["positions"][2].tolist() == [0, 1, 2, 3, 0, 0]
  assert batch["tokens"][2].tolist() == [1, c + 3, c + 3, c + 3, 1, 0]


def test_pydoc_splits_cover_all_topics():
  from pydoc_data.topics import topics

  parts = {}
  for split in ("train", "test", "all"):
    batch = read_all(text.Source(64, name="pydoc", split=split))
    raw = (batch["targets"][batch["loss_mask"] > 0] - 3).astype(np.uint8)
    parts[split] = raw.tobytes().decode()
    assert batch["num_bytes"].sum() == len(raw)
  assert "\n\n".join((parts["train"], parts["test"])) == parts["all"]
  last = max(topics)
  assert parts["test"].endswith(topics[last])
  held_out = sorted(topics)[-(len(topics) // 10) :]
  assert parts["test"] == "\n\n".join(topics[name] for name in held_out)
  half = text.Source(64, name="pydoc", split="train[:50%]")
  whole = text.Source(64, name="pydoc")
  assert abs(len(half) - len(whole) / 2) <= 1
  assert half.fingerprint() != whole.fingerprint()


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(), "either path or name"),
    (dict(name="pydoc", path="x"), "either path or name"),
    (dict(name="pidoc"), "Did you mean 'pydoc'"),
    (dict(name="pydoc", split="trian"), "mean 'train'"),
    (dict(path="{tmp}/a", split="train"), "requires name"),
    (dict(path="{tmp}/b"), "no such file"),
    (dict(path="{tmp}/a", last="dorp"), "mean 'drop'"),
    (
      dict(path="{tmp}/a", stride=0),
      "stride: expected a whole number at",
    ),
    (dict(path="{tmp}/a", packing=True, stride=2), "packing=True"),
    (dict(path="{tmp}/a", slice="[5:]"), "slice: 5 is more"),
  ],
)
def test_mistakes(tmp_path, options, message):
  (tmp_path / "a").write_text("a text")
  if "path" in options:
    options = {**options, "path": options["path"].format(tmp=tmp_path)}
  with pytest.raises(ConfigError) as e:
    text.Source(4, **options)
  assert message in str(e.value)


def test_empty_short_and_changed_files_are_errors(tmp_path):
  (tmp_path / "a").write_text("")
  with pytest.raises(DataError, match="contains no bytes"):
    text.Source(4, str(tmp_path / "a"))
  (tmp_path / "a").write_text("abc")
  with pytest.raises(DataError, match="last='pad'"):
    text.Source(4, str(tmp_path / "a"), last="drop")
  source = text.Source(2, str(tmp_path / "a"))
  (tmp_path / "a").write_text("ab")
  with pytest.raises(DataError, match="2 bytes; expected 3"):
    source.read(np.asarray([0]))


def test_a_slice_of_packed_windows_has_documents_of_all_lengths(tmp_path):
  for i, size in enumerate(np.random.default_rng(0).integers(1, 60, 300)):
    (tmp_path / f"{i:03}").write_text("x" * int(size))
  windows = text.Source(64, str(tmp_path / "*"), packing=True)
  longest = read_all(windows)["positions"].max(axis=1)
  half = len(longest) // 2
  assert abs(longest[:half].mean() / longest[half:].mean() - 1) < 0.1
