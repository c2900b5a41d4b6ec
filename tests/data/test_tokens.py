"""Windows of token ids, and the formats of several programs."""

import json
import pickle
import struct

import numpy as np
import pytest

from bigtrain.data import tokens
from bigtrain.data.formats import token_files
from bigtrain.settings import ConfigError, DataError

EOS = 9
DOCUMENTS = [
  [1, 2, 3, 4, 5, EOS],
  [6, EOS],
  [7, 8, 1, 2, 3, 4, 5, 6, 7, EOS],
  [2, EOS],
]
IDS = np.concatenate(DOCUMENTS)
SIZES = np.asarray([len(d) for d in DOCUMENTS])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plain(folder, dtype=np.uint16):
  (folder / "x.bin").write_bytes(IDS.astype(dtype).tobytes())
  return str(folder / "x.bin")


def llmc(folder):
  header = np.zeros(256, np.int32)
  header[:3] = 20240520, 1, len(IDS)
  raw = header.tobytes() + IDS.astype(np.uint16).tobytes()
  (folder / "x.bin").write_bytes(raw)
  return str(folder / "x.bin")


def megatron(folder, code=8, dtype=np.uint16):
  raw = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 4, 5)
  raw += SIZES.astype(np.int32).tobytes()
  pointers = (np.cumsum(SIZES) - SIZES) * np.dtype(dtype).itemsize
  raw += pointers.astype(np.int64).tobytes()
  raw += np.arange(5, dtype=np.int64).tobytes()
  (folder / "x.idx").write_bytes(raw)
  (folder / "x.bin").write_bytes(IDS.astype(dtype).tobytes())
  return str(folder / "x")


def pbin(folder, itemsize=2, header=0):
  kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[itemsize]
  raw = IDS.astype(kind).tobytes()
  starts = (np.cumsum(SIZES) - SIZES) * itemsize + header
  index = list(zip(starts.tolist(), (SIZES * itemsize).tolist()))
  head = len(raw).to_bytes(8, "little") + itemsize.to_bytes(4, "little")
  (folder / "x.pbin").write_bytes(head + raw + pickle.dumps(index))
  return str(folder / "x.pbin")


def own(folder, eos_id=EOS, bos_id=None):
  """Two shards of two documents."""
  folder = folder / "own"
  folder.mkdir()
  shards = []
  for name, part in (("00000", DOCUMENTS[:2]), ("00001", DOCUMENTS[2:])):
    ids = np.concatenate(part).astype(np.uint16)
    (folder / f"{name}.bin").write_bytes(ids.tobytes())
    np.save(folder / f"{name}.ends.npy", np.cumsum([len(d) for d in part]))
    shards.append(dict(name=name, num_tokens=len(ids), num_documents=2))
  manifest = dict(
    format="bigtrain tokens",
    version=1,
    dtype="uint16",
    tokenizer=dict(name="bytes", vocab_size=259, fingerprint="?"),
    eos_id=eos_id,
    bos_id=bos_id,
    num_tokens=len(IDS),
    num_documents=4,
    num_bytes=50,
    shards=shards,
  )
  (folder / "manifest.json").write_text(json.dumps(manifest))
  return str(folder)


FORMATS = {
  "plain": (plain, dict(eos_id=EOS)),
  "uint32": (lambda f: plain(f, np.uint32), dict(eos_id=EOS, dtype="uint32")),
  "llm.c": (llmc, dict(eos_id=EOS)),
  "megatron": (megatron, dict(eos_id=EOS)),
  "megatron int32": (lambda f: megatron(f, 4, np.int32), dict(eos_id=EOS)),
  "pbin": (pbin, dict(eos_id=EOS)),
  "pbin of bytes": (lambda f: pbin(f, 1), dict(eos_id=EOS)),
  "pbin from the header": (lambda f: pbin(f, 4, 12), dict(eos_id=EOS)),
}


def read_all(source):
  batch = source.read(np.arange(len(source)))
  assert {k: (v.dtype, v.shape[1:]) for k, v in batch.items()} == source.spec
  return batch


def real(batch):
  return batch["segments" if "segments" in batch else "loss_mask"] > 0


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_say_the_same(tmp_path, name):
  write, options = FORMATS[name]
  path = write(tmp_path)
  batch = read_all(tokens.Source(4, path, **options))
  assert batch["targets"][real(batch)].tolist() == IDS.tolist()
  before = np.append(EOS, IDS[:-1])
  assert batch["tokens"][real(batch)].tolist() == before.tolist()
  apart = read_all(tokens.Source(4, path, cross_documents=False, **options))
  found = [
    row[mask].tolist() for row, mask in zip(apart["targets"], real(apart))
  ]
  cut = [d[i : i + 4] for d in DOCUMENTS for i in range(0, len(d), 4)]
  assert found == cut


def check_segments(batch, documents=DOCUMENTS):
  """Runs of one segment are parts of one document, in order."""
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


@pytest.mark.parametrize("write", [own, plain])
def test_packed_documents(tmp_path, write):
  options = {} if write is own else dict(eos_id=EOS)
  path = write(tmp_path)
  batch = read_all(tokens.Source(6, path, packing=True, **options))
  runs = check_segments(batch)
  want = []
  for document in DOCUMENTS:
    context = [EOS, *document[:-1]]
    for i in range(0, len(document), 6):
      want.append((context[i : i + 6], document[i : i + 6]))
  assert sorted(runs) == sorted(want)
  # 6, 6, then 4 + 2, then 2: as full as it can be.
  assert sorted(real(batch).sum(axis=1)) == [2, 6, 6, 6]


def test_windows_that_tell_documents_apart(tmp_path):
  path = own(tmp_path)
  plain_windows = read_all(tokens.Source(5, path))
  batch = read_all(tokens.Source(5, path, segments=True))
  for name in ("tokens", "targets"):
    assert np.array_equal(batch[name], plain_windows[name])
  check_segments(batch)
  assert batch["segments"][1].tolist() == [1, 2, 2, 0, 0]
  assert batch["targets"][1].tolist() == [EOS, 6, EOS, 0, 0]


def test_without_an_end_token_the_first_of_a_document_is_context(tmp_path):
  path = megatron(tmp_path)
  batch = read_all(tokens.Source(6, path))
  assert batch["targets"][real(batch)].tolist() == IDS[1:].tolist()
  for options in (dict(packing=True), dict(segments=True)):
    batch = read_all(tokens.Source(6, path, **options))
    found = [pair for run in check_segments(batch) for pair in zip(*run)]
    want = [pair for d in DOCUMENTS for pair in zip(d[:-1], d[1:])]
    assert sorted(found) == sorted(want)
    assert batch["targets"].max() == EOS


def test_begin_tokens_in_the_data_need_no_other_context(tmp_path):
  batch = read_all(tokens.Source(6, own(tmp_path, bos_id=1), packing=True))
  assert real(batch).sum() == len(IDS) - len(DOCUMENTS)


def test_bytes_of_text_behind_the_targets(tmp_path):
  path = own(tmp_path)
  batch = read_all(tokens.Source(6, path))
  np.testing.assert_allclose(batch["num_bytes"].sum(), 50, rtol=1e-6)
  assert "num_bytes" not in tokens.Source(6, plain(tmp_path)).spec


def test_stride_drop_and_slices(tmp_path):
  path = plain(tmp_path)
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


def test_the_manifest_refuses_another_tokenizer_or_vocabulary(tmp_path):
  path = own(tmp_path)
  assert tokens.Source(4, path).vocab_sizes == {"tokens": 259, "targets": 259}
  for options, message in (
    (dict(tokenizer="bytes"), "made with another"),
    (dict(vocab_size=300), "vocab_size=300"),
    (dict(eos_id=3), "eos_id=3"),
  ):
    with pytest.raises(ConfigError, match=message):
      tokens.Source(4, path, **options)
  with pytest.raises(ConfigError, match="made with"):
    tokens.Source(4, plain(tmp_path), tokenizer="bytes")


def test_ids_beyond_the_vocabulary_name_the_place(tmp_path):
  path = plain(tmp_path)
  source = tokens.Source(4, path, vocab_size=EOS)
  with pytest.raises(DataError, match=r"x\.bin, token 5.*id 9.*has 9"):
    source.read(np.asarray([0, 1]))


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(dtype="float32"), "expected one of uint8"),
    (dict(packing=True), "eos_id"),
    (dict(cross_documents=False, packing=True), "one document each"),
    (dict(cross_documents=False, last="drop", eos_id=EOS), "whole documents"),
    (dict(length=100, last="drop"), "no window of 100"),
  ],
)
def test_mistakes(tmp_path, options, message):
  with pytest.raises(ConfigError, match=message):
    tokens.Source(**{"length": 4, "path": plain(tmp_path), **options})


def cut(path, by=1):
  raw = path.read_bytes()
  path.write_bytes(raw[: len(raw) - by])


def test_damaged_files_are_refused(tmp_path):
  plain(tmp_path)
  cut(tmp_path / "x.bin")
  with pytest.raises(DataError, match="no whole number"):
    tokens.Source(4, str(tmp_path / "x.bin"))
  megatron(tmp_path)
  cut(tmp_path / "x.bin", 2)
  with pytest.raises(DataError, match="cut short"):
    tokens.Source(4, str(tmp_path / "x"))
  megatron(tmp_path)
  cut(tmp_path / "x.idx", 9)
  with pytest.raises(DataError, match="cut short"):
    tokens.Source(4, str(tmp_path / "x.bin"))
  (tmp_path / "x.idx").write_bytes(b"something else, long enough to be one..")
  with pytest.raises(DataError, match="no Megatron index"):
    tokens.Source(4, str(tmp_path / "x.bin"))
  path = own(tmp_path)
  cut(tmp_path / "own" / "00001.bin", 2)
  with pytest.raises(DataError, match="24 bytes|22 bytes"):
    tokens.Source(4, path)
  (tmp_path / "own" / "00001.bin").unlink()
  with pytest.raises(DataError, match="missing"):
    tokens.Source(4, path)
  (tmp_path / "own" / "manifest.json").unlink()
  with pytest.raises(DataError, match="not finished"):
    tokens.Source(4, path)


class Evil:
  def __reduce__(self):
    return print, ("unpickled",)


def test_no_pickle_of_a_file_runs_code(tmp_path, capsys):
  path = pbin(tmp_path)
  raw = (tmp_path / "x.pbin").read_bytes()[: 12 + 2 * len(IDS)]
  for index in (Evil(), [Evil()], [(0, 1.5)], {"a": 1}):
    (tmp_path / "x.pbin").write_bytes(raw + pickle.dumps(index))
    with pytest.raises(DataError, match="index"):
      tokens.Source(4, path)
  assert "unpickled" not in capsys.readouterr().out


def test_shards_that_lead_out_of_the_folder(tmp_path):
  path = own(tmp_path)
  manifest = token_files.read_manifest(path)
  manifest["shards"][0]["name"] = "../x"
  (tmp_path / "own" / "manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(DataError, match="not in the folder"):
    tokens.Source(4, path)
