"""Benchmark 21: pictures from tar shards, compared with a folder of files.

Photograph-like JPEGs of 375 x 500 pixels and about 64 KB are decoded, randomly
cropped and resized to 224 x 224, from ten shards and from a folder per class in
turns. The figure is this process's CPU time. Another figure is without
decoding: all pictures are read by index, in random order. The shards' index is
made before.
"""

import io
import os
import pathlib
import tarfile
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import jpegs, measure

_BATCH = 64
_SHARDS = 10
# Steps at which a run starts, which should take equally long.
_STEPS = (100, 100_000)


def main() -> None:
  """Prints rates as a ratio, and seconds of a first sample and of resuming."""
  from bigtrain.data import image_folder, webdataset

  args = measure.arguments(__doc__)
  number, batches = (200, 2) if args.quick else (10_000, 60)
  with tempfile.TemporaryDirectory() as folder:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    pictures = os.path.join(folder, "pictures")
    pattern = _write(folder, pictures, number)
    webdataset.Source(pattern)
    sources = {
      "tar": dict(type="webdataset", path=pattern),
      "folder": dict(type="image_folder", path=pictures),
    }
    secs = measure.interleave(
      {name: _taker(data, 0, batches) for name, data in sources.items()},
      args.repeats,
    )
    rate = measure.ratios(secs["folder"], secs["tar"])
    name = f"rate from tar shards / from a folder, {number:,} JPEGs"
    measure.report(21, name, rate, target=">= 0.95")

    opened = {
      "tar": webdataset.Source(pattern),
      "folder": image_folder.Source(pictures),
    }
    secs = measure.interleave(
      {name: _reader(source) for name, source in opened.items()}, args.repeats
    )
    rate = measure.ratios(secs["folder"], secs["tar"])
    measure.report(21, f"{name}, not decoded", rate, target=">= 0.95")

    def first_sample() -> float:
      read = lambda: webdataset.Source(pattern).read(np.asarray([number // 2]))
      return measure.timed(read)

    first = [first_sample() for _ in range(args.repeats)]
    name = "first sample of tar shards, with their index"
    measure.report(21, name, first, unit="s", target="<= 1")
    calls = {step: _taker(sources["tar"], step, 4) for step in _STEPS}
    starts = measure.interleave(
      {str(step): call for step, call in calls.items()}, args.repeats
    )
    early, late = (starts[str(step)] for step in _STEPS)
    name = "start at step 100,000 / at step 100, tar shards"
    measure.report(21, name, measure.ratios(late, early), target="<= 1.1")


def _write(folder: str, pictures: str, number: int) -> str:
  """Writes the same pictures as files and as shards; returns their pattern."""
  originals = jpegs.write(os.path.join(folder, "originals"), min(64, number))
  contents = [pathlib.Path(path).read_bytes() for path in originals]
  for label in range(4):
    os.makedirs(os.path.join(pictures, f"class-{label}"))
  for i in range(number):
    path = os.path.join(pictures, f"class-{i % 4}", f"{i:06}.jpg")
    pathlib.Path(path).write_bytes(contents[i % len(contents)])
  for shard in range(_SHARDS):
    path = os.path.join(folder, f"x-{shard:02}.tar")
    with tarfile.open(path, "w") as tar:
      for i in range(shard, number, _SHARDS):
        sample = {"jpg": contents[i % len(contents)], "cls": b"%d" % (i % 4)}
        for extension, content in sample.items():
          member = tarfile.TarInfo(f"{i:06}.{extension}")
          member.size = len(content)
          tar.addfile(member, io.BytesIO(content))
  return os.path.join(folder, "x-{00..09}.tar")


def _taker(data: Any, step: int, batches: int) -> Callable[[], float]:
  """Measures the CPU time of this number of batches from a step."""
  from bigtrain import sharding
  from bigtrain.config import settings
  from bigtrain.inputs import pipeline

  pp = jpegs.TRAIN_PP.format(size=224)
  config = {"data": data, "pp": pp, "batch_size": _BATCH}

  def secs() -> float:
    train_input = pipeline.make_train(
      settings.Config(config, "config.input"), seed=0, mesh=sharding.make_mesh()
    )
    start = time.process_time()
    for _ in train_input.start(step, step + batches):
      pass
    return time.process_time() - start

  return secs


def _reader(source: Any) -> Callable[[], float]:
  """Measures the CPU time of reading all examples in batches."""
  order = np.random.default_rng(0).permutation(len(source))

  def secs() -> float:
    start = time.process_time()
    for at in range(0, len(order), _BATCH):
      source.read(order[at : at + _BATCH])
    return time.process_time() - start

  return secs


if __name__ == "__main__":
  main()
