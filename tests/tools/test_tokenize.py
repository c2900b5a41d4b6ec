"""Token files: formats, errors and interruptions."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import tokens
from bigtrain.data.formats import documents, token_writer
from bigtrain.text import tokenizers
from bigtrain.tools import tokenize

BYTES = tokenizers.get("bytes")
TEXTS = ["the first", "zwöi", "", "a third one\nof two lines", "4"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def jsonl(texts):
  return "".join(json.dumps({"text": t, "n": 1}) + "\n" for t in texts).encode()


def write_zstd(path, raw):
  zstandard = pytest.importorskip("zstandard")
  half = len(raw) // 2
  frames = [zstandard.compress(part) for part in (raw[:half], raw[half:])]
  path.write_bytes(b"".join(frames))


def write_parquet(path, texts):
  pyarrow = pytest.importorskip("pyarrow")
  pytest.importorskip("pyarrow.parquet")
  table = pyarrow.table({"text": texts, "n": list(range(len(texts)))})
  pyarrow.parquet.write_table(table, path, row_group_size=2)


WRITERS = {
  "x.jsonl": lambda p: p.write_bytes(jsonl(TEXTS)),
  "x.jsonl.gz": lambda p: p.write_bytes(gzip.compress(jsonl(TEXTS))),
  "x.json": lambda p: p.write_text(json.dumps([{"text": t} for t in TEXTS])),
  "x.jsonl.zst": lambda p: write_zstd(p, jsonl(TEXTS)),
  "x.parquet": lambda p: write_parquet(p, TEXTS),
}


def written(folder):
  """Texts of the documents in a folder, in order."""
  manifest = json.loads((folder / "manifest.json").read_text())
  texts = []
  for shard in manifest["shards"]:
    ids = np.fromfile(folder / f"{shard['name']}.bin", manifest["dtype"])
    ends = np.load(folder / f"{shard['name']}.ends.npy")
    for document in np.split(ids, ends[:-1]):
      assert document[-1] == BYTES.eos_id
      texts.append(BYTES.decode(document))
  return texts


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path, name):
  WRITERS[name](tmp_path / name)
  out = tmp_path / "out"
  manifest = tokenize.tokenize(
    [str(tmp_path / "x*")], str(out), "bytes", shard_bytes=64
  )
  texts = [t for t in TEXTS if t]
  assert written(out) == texts
  size = sum(len(t.encode()) for t in texts)
  counts = dict(num_documents=4, num_bytes=size, num_tokens=size + 4)
  counts |= dict(num_empty=1, num_skipped=0, dtype="uint16", eos_id=2)
  assert {k: manifest[k] for k in counts} == counts
  assert manifest["tokenizer"] == dict(
    name="bytes", vocab_size=259, fingerprint=BYTES.fingerprint()
  )
  assert manifest["sources"][0]["size"] == (tmp_path / name).stat().st_size
  # Only splittable files have several shards.
  assert (len(manifest["shards"]) > 1) == (name in ("x.jsonl", "x.parquet"))
  source = tokens.Source(8, str(out), packing=True, tokenizer="bytes")
  batch = source.read(np.arange(len(source)))
  assert (batch["segments"] > 0).sum() == size + 4
  np.testing.assert_allclose(batch["num_bytes"].sum(), size, rtol=1e-6)


def test_plain_text_is_a_document_per_file_or_per_line(tmp_path):
  for i, text in enumerate(TEXTS):
    (tmp_path / f"{i}.txt").write_text(text)
  tokenize.tokenize([str(tmp_path / "*.txt")], str(tmp_path / "a"), "bytes")
  assert written(tmp_path / "a") == [t for t in TEXTS if t]
  (tmp_path / "x.log").write_bytes(b"one\r\n\n  \ntwo\nthree")
  tokenize.tokenize(
    [str(tmp_path / "x.log")], str(tmp_path / "b"), "bytes", format="lines"
  )
  assert written(tmp_path / "b") == ["one", "two", "three"]


def test_lines_are_read_once_wherever_a_file_is_split(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_bytes(jsonl(TEXTS * 3))
  for size in range(1, 120, 7):
    texts = [
      text
      for part in documents.parts(str(path), "auto", size)
      for text in documents.read(part, "text")
    ]
    assert texts == TEXTS * 3


def test_begin_tokens_without_end_tokens(tmp_path):
  (tmp_path / "x.txt").write_text("ab")
  tokenize.tokenize(
    [str(tmp_path / "x.txt")], str(tmp_path / "a"), "bytes", bos=True, eos=False
  )
  ids = np.fromfile(tmp_path / "a" / "00000.bin", np.uint16)
  assert ids.tolist() == [1, *BYTES.encode("ab")]


BAD = {
  b"no json\n": "line 3: not valid JSON",
  b'{"txt": "a"}\n': "line 3: no field 'text'. Did you mean 'txt'?",
  b'{"text": 5}\n': "line 3: field 'text': expected a string, got int",
  b'{"text": "\\ud800"}\n': "line 3: field 'text' contains a lone surrogate",
  b'{"text": "\xff"}\n': "line 3: not valid JSON",
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_bad_document_is_an_error_or_is_counted(tmp_path, bad, name):
  raw = jsonl(TEXTS[:2]) + bad + jsonl(TEXTS[2:])
  (tmp_path / name).write_bytes(
    gzip.compress(raw) if name.endswith("gz") else raw
  )
  inputs, out = [str(tmp_path / name)], str(tmp_path / "out")
  # Each line is a shard.
  options = dict(shard_bytes=20)
  with pytest.raises(DataError) as e:
    tokenize.tokenize(inputs, out, "bytes", **options)
  assert BAD[bad] in str(e.value) and name in str(e.value)
  manifest = tokenize.tokenize(inputs, out, "bytes", skip_errors=1, **options)
  assert manifest["num_skipped"] == 1
  assert written(tmp_path / "out") == [t for t in TEXTS if t]


def test_skip_errors_limits_the_sum_over_all_shards(tmp_path):
  (tmp_path / "x.jsonl").write_bytes(b"bad line number one\n" * 6)
  inputs, out = [str(tmp_path / "x.jsonl")], str(tmp_path / "out")
  for _ in range(2):  # The second time, only the last shard is missing.
    with pytest.raises(DataError, match="skip_errors=5|not valid"):
      tokenize.tokenize(inputs, out, "bytes", skip_errors=5, shard_bytes=20)
  with pytest.raises(DataError, match="no text"):
    tokenize.tokenize(inputs, out, "bytes", skip_errors=6, shard_bytes=20)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_truncated_files_are_errors(tmp_path, name):
  WRITERS[name](tmp_path / name)
  raw = (tmp_path / name).read_bytes()
  (tmp_path / name).write_bytes(raw[:-6])
  with pytest.raises(DataError, match=name):
    tokenize.tokenize(
      [str(tmp_path / name)], str(tmp_path / "out"), "bytes", skip_errors=99
    )


def test_a_folder_has_one_recipe(tmp_path):
  (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS))
  inputs, out = [str(tmp_path / "x.jsonl")], str(tmp_path / "out")
  first = tokenize.tokenize(inputs, out, "bytes")
  assert tokenize.tokenize(inputs, out, "bytes") == first
  with pytest.raises(ConfigError, match="another 'eos_id': 2, now null"):
    tokenize.tokenize(inputs, out, "bytes", eos=False)
  (tmp_path / "x.jsonl").write_bytes(jsonl(TEXTS[::-1]))
  with pytest.raises(ConfigError, match="another 'sources'"):
    tokenize.tokenize(inputs, out, "bytes")
  with pytest.raises(ConfigError, match="contains other files, such as .out."):
    tokenize.tokenize(inputs, str(tmp_path), "bytes")
  with pytest.raises(ConfigError, match="given twice"):
    tokenize.tokenize(inputs * 2, str(tmp_path / "b"), "bytes")
  with pytest.raises(ConfigError, match=r"no such file. Did you mean 'x.jsonl"):
    tokenize.tokenize([inputs[0][:-1]], str(tmp_path / "b"), "bytes")


def test_a_second_process_is_refused(tmp_path):
  (tmp_path / "x.txt").write_text("a")
  (tmp_path / "out").mkdir()
  with tokenize._locked(str(tmp_path / "out")):
    with pytest.raises(ConfigError, match="another process"):
      tokenize.tokenize(
        [str(tmp_path / "x.txt")], str(tmp_path / "out"), "bytes"
      )


def content(folder):
  return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


class Killed(BaseException):
  pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """(inputs of a few shards, files of an uninterrupted run)."""
  folder = tmp_path_factory.mktemp("corpus")
  rng = np.random.default_rng(0)
  texts = ["x" * n for n in rng.integers(1, 60, 24)]
  (folder / "x.jsonl").write_bytes(jsonl(texts))
  inputs = [str(folder / "x.jsonl")]
  tokenize.tokenize(inputs, str(folder / "out"), "bytes", shard_bytes=600)
  expected = content(folder / "out")
  assert len(expected) == 1 + 2 * 3
  return inputs, expected


def test_an_interruption_before_any_write_keeps_the_bytes(
  corpus, tmp_path, monkeypatch
):
  inputs, expected = corpus
  real = os.replace
  for stop_at in range(20):
    calls = 0

    def dying(source, target, stop_at=stop_at):
      nonlocal calls
      calls += 1
      if calls > stop_at:
        raise Killed
      real(source, target)

    out = tmp_path / str(stop_at)
    monkeypatch.setattr(os, "replace", dying)
    try:
      tokenize.tokenize(inputs, str(out), "bytes", shard_bytes=600)
      break
    except Killed:
      assert not (out / "manifest.json").exists()
    monkeypatch.setattr(os, "replace", real)
    tokenize.tokenize(inputs, str(out), "bytes", shard_bytes=600)
    assert content(out) == expected
  assert stop_at == 3 * 3 + 2


def test_an_interruption_of_the_cleanup_keeps_the_bytes(
  corpus, tmp_path, monkeypatch
):
  inputs, expected = corpus

  def dying(folder):
    raise Killed

  monkeypatch.setattr(tokenize, "_clean", dying)
  with pytest.raises(Killed):
    tokenize.tokenize(inputs, str(tmp_path), "bytes", shard_bytes=600)
  monkeypatch.undo()
  assert len(content(tmp_path)) > len(expected)
  tokenize.tokenize(inputs, str(tmp_path), "bytes", shard_bytes=600)
  assert content(tmp_path) == expected


def test_a_damaged_shard_is_rewritten(corpus, tmp_path, monkeypatch):
  inputs, expected = corpus
  monkeypatch.setattr(tokenize, "_finish", lambda *args: None)
  tokenize.tokenize(inputs, str(tmp_path), "bytes", shard_bytes=600)
  monkeypatch.undo()
  raw = bytearray((tmp_path / "00001.bin").read_bytes())
  raw[7] ^= 1
  (tmp_path / "00001.bin").write_bytes(raw)
  (tmp_path / "00002.ends.npy").unlink()
  (tmp_path / "00003.bin.99.tmp").write_bytes(b"of a process that was killed")
  tokenize.tokenize(inputs, str(tmp_path), "bytes", shard_bytes=600)
  assert content(tmp_path) == expected
  assert token_writer.finished_shard(str(tmp_path), "00001") is None


def test_several_processes_and_the_command_line(corpus, tmp_path):
  inputs, expected = corpus
  command = [sys.executable, "-m", "bigtrain.tools.tokenize", *inputs]
  command += ["--tokenizer=bytes", "--processes=2"]
  command += [f"--output={tmp_path / 'out'}"]
  finished = subprocess.run(
    command, capture_output=True, text=True, timeout=300
  )
  assert finished.returncode == 0, finished.stderr
  assert "24 documents" in finished.stdout
  tokenize.tokenize(
    inputs, str(tmp_path / "two"), "bytes", shard_bytes=600, processes=2
  )
  assert content(tmp_path / "two") == expected
  finished = subprocess.run(
    [*command, "--no-eos"], capture_output=True, text=True, timeout=300
  )
  assert finished.returncode == 2
  assert finished.stderr.startswith("error: --output=")
  assert len(finished.stderr.splitlines()) == 1


@pytest.mark.slow
def test_sigkill_at_any_moment_keeps_the_bytes(tmp_path):
  rng = np.random.default_rng(0)
  texts = [bytes(rng.integers(97, 123, 4000, np.uint8)).decode()] * 1500
  (tmp_path / "x.jsonl").write_bytes(jsonl(texts))
  command = [sys.executable, "-m", "bigtrain.tools.tokenize", "--processes=2"]
  command += ["--tokenizer=bytes", "--shard_mb=1", str(tmp_path / "x.jsonl")]
  subprocess.run(
    [*command, f"--output={tmp_path / 'quiet'}"], check=True, timeout=300
  )
  out, kills = tmp_path / "out", 0

  def names():
    return {path.name for path in out.rglob("*")}

  while not (out / "manifest.json").exists():
    before = names()
    job = subprocess.Popen([*command, f"--output={out}"])
    # Kill at the first new file, so at another moment each time.
    while job.poll() is None and names() <= before:
      time.sleep(0.001)
    time.sleep(0.02 * (kills % 5))
    if job.poll() is None:
      job.send_signal(signal.SIGKILL)
      kills += 1
    job.wait()
    assert kills < 100
  assert kills > 1
  subprocess.run(
    [*command, f"--output={tmp_path / 'out'}"], check=True, timeout=300
  )
  assert content(tmp_path / "out") == content(tmp_path / "quiet")
