"""Writes one small corpus in each format of token files."""

import json
import pickle
import struct

import numpy as np

EOS = 9
DOCUMENTS = [
  [1, 2, 3, 4, 5, EOS],
  [6, EOS],
  [7, 8, 1, 2, 3, 4, 5, 6, 7, EOS],
  [2, EOS],
]
IDS = np.concatenate(DOCUMENTS)
SIZES = np.asarray([len(d) for d in DOCUMENTS])


def plain(folder, dtype=np.uint16):
  """nanoGPT's format."""
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


def tokenized(folder, eos_id=EOS, bos_id=None):
  """A folder of bigtrain.tools.tokenize with two shards of two documents."""
  folder = folder / "tokenized"
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
