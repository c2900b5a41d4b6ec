"""Benchmark 8: rate of the input pipeline on JPEGs.

Photograph-like JPEGs of 375 x 500 pixels and about 64 KB are decoded, randomly
cropped, resized to 224 x 224, flipped, scaled and batched. The limit is the
rate of one thread that decodes, crops and resizes, times the number of cores.
The rate of one thread per core is reported too; it is lower if cores share
units. The peers take turns with our pipeline. All of them run endlessly, and
wait with full queues while another one is measured.
"""

import io
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import jpegs, measure

_BATCH = 64
# More batches than any of them has queued at the start of its turn.
_LEAD_IN_BATCHES = 10


def main() -> None:
  """Prints ratios to the limit and the peers, and a training rate."""
  args = measure.arguments(__doc__)
  with tempfile.TemporaryDirectory() as folder:
    if args.quick:
      paths, size = jpegs.write(folder, 16, 48, 64, 2_000), 32
    else:
      paths, size = jpegs.write(folder, 256), 224
    _rates(folder, paths, size, args.quick, args.repeats)
    _training(folder, args.quick, args.repeats)


def _rates(
  folder: str, paths: Sequence[str], size: int, quick: bool, repeats: int
) -> None:
  secs = 0.1 if quick else 1.5
  calls = {
    "limit": decoder(paths, size, secs, threads=1),
    "all cores": decoder(paths, size, secs, threads=measure.cores()),
  }
  makers = {
    "pipeline": lambda: pipeline(folder, size),
    "plain tf.data": lambda: tf_data(paths, size),
    "torch DataLoader": lambda: torch_loader(paths, size),
    "Grain": lambda: grain_loader(paths, size),
  }
  needs = {"torch DataLoader": ("torch", "PIL"), "Grain": ("grain", "PIL")}
  skipped = {}
  for name, make in makers.items():
    reason = measure.missing(*needs.get(name, ()))
    if name in needs and quick:
      reason = reason or "not in --quick"
    if reason:
      skipped[name] = reason
    else:
      calls[name] = taker(make(), 1 if quick else _LEAD_IN_BATCHES, secs)
  rates = measure.interleave(calls, repeats)
  single = rates["limit"]
  report = measure.report
  report(8, "limit: JPEG decode, crop, resize, 1 thread", single, unit="img/s")
  limits = [rate * measure.cores() for rate in single]
  ours, together = rates["pipeline"], rates["all cores"]
  name = "limit: the same, as many threads as cores / (cores x 1 thread)"
  report(8, name, measure.ratios(together, limits))
  for name in makers:
    over = f"{name} / (cores x 1 thread)"
    if name in skipped:
      measure.skip(8, over, skipped[name])
      continue
    target = ">= 0.85" if name == "pipeline" else None
    report(8, over, measure.ratios(rates[name], limits), target=target)
    if name != "pipeline":
      report(8, f"pipeline / {name}", measure.ratios(ours, rates[name]))
  report(8, "pipeline", ours, unit="img/s")


def _training(folder: str, quick: bool, repeats: int) -> None:
  from benchmarks import program

  variant, size, batch_size = ("mu/16", 16, 8) if quick else ("Ti/32", 224, 16)
  config = jpegs.get_config(
    f"folder={folder},variant={variant},size={size},batch_size={batch_size}"
  )
  if quick:
    config.log_steps = 2
  slowdown = program.loop_ratios(config, config.log_steps, repeats)
  name = f"training rate, JPEGs / resident batch: ViT-{variant} at {size}"
  measure.report(8, name, [1 / x for x in slowdown], target=">= 0.85")


def taker(
  batches: Iterator[Any], lead_in: int, secs: float
) -> Callable[[], float]:
  """Returns a function that measures images per second for `secs` or more."""

  def rate() -> float:
    for _ in range(lead_in):
      next(batches)
    number, start_secs, now = 0, time.perf_counter(), 0.0
    while now < secs:
      next(batches)
      number += 1
      now = time.perf_counter() - start_secs
    return number * _BATCH / now

  return rate


def decoder(
  paths: Iterable[str], size: int, secs: float, threads: int
) -> Callable[[], float]:
  """Returns a function that measures the rate of decode, crop and resize.

  The rate is in images per second, from memory, without using the results.
  """
  import tensorflow as tf

  encoded = []
  for path in paths:
    with open(path, "rb") as file:
      encoded.append(file.read())
  options = tf.data.Options()
  options.threading.private_threadpool_size = threads
  options.threading.max_intra_op_parallelism = 1
  options.autotune.enabled = False
  images = tf.data.Dataset.from_tensor_slices(encoded).repeat()
  images = images.map(
    lambda x: _tf_crop(x, size),
    num_parallel_calls=threads if threads > 1 else None,
    deterministic=False if threads > 1 else None,
  )

  def run(number: int) -> float:
    chosen = images.take(number).with_options(options)
    return measure.timed(lambda: chosen.reduce(0, lambda n, image: n + 1))

  number = len(encoded)
  number = max(1, round(number * secs / run(number)))
  return lambda: number / run(number)


def _tf_crop(encoded: Any, size: int) -> Any:
  """Returns a random window of an encoded image, resized."""
  import tensorflow as tf

  begin, extent, _ = tf.image.sample_distorted_bounding_box(
    tf.io.extract_jpeg_shape(encoded),
    tf.zeros([0, 0, 4], tf.float32),
    area_range=(0.05, 1.0),
    aspect_ratio_range=(0.75, 1.33),
    min_object_covered=0,
    use_image_if_no_bounding_boxes=True,
  )
  window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
  image = tf.io.decode_and_crop_jpeg(encoded, window, channels=3)
  return tf.image.resize(image, [size, size])


def pipeline(folder: str, size: int) -> Iterator[Any]:
  """Returns our batches, on the device."""
  from bigtrain import sharding
  from bigtrain.config import settings
  from bigtrain.inputs import pipeline

  config = {
    "data": {"type": "image_folder", "path": folder},
    "pp": jpegs.TRAIN_PP.format(size=size),
    "batch_size": _BATCH,
  }
  train_input = pipeline.make_train(
    settings.Config(config, "config.input"), seed=0, mesh=sharding.make_mesh()
  )
  return train_input.start(0, 10**9)


def tf_data(paths: Sequence[str], size: int) -> Iterator[Any]:
  """Returns batches of a hand-written tf.data pipeline with autotuning."""
  import tensorflow as tf

  def example(path: Any, label: Any) -> tuple[Any, Any]:
    image = tf.image.random_flip_left_right(
      _tf_crop(tf.io.read_file(path), size)
    )
    return image / 127.5 - 1.0, tf.one_hot(label, 1000)

  labels = [i % 4 for i in range(len(paths))]
  dataset = tf.data.Dataset.from_tensor_slices((list(paths), labels))
  dataset = dataset.shuffle(len(paths)).repeat()
  dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)
  dataset = dataset.batch(_BATCH, drop_remainder=True)
  return dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


class Images:
  """Examples by index, made with Pillow, for loaders that run Python.

  Args:
    paths: paths of the images.
    size: height and width of the examples in pixels.
  """

  def __init__(self, paths: Sequence[str], size: int):
    self._paths = list(paths)
    self._size = size

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    """Returns (float32 [size, size, 3] from -1 to 1, label)."""
    import PIL.Image

    with open(self._paths[index], "rb") as file:
      image = PIL.Image.open(io.BytesIO(file.read())).convert("RGB")
    width, height = image.size
    area = width * height * random.uniform(0.05, 1.0)
    ratio = random.uniform(0.75, 1.33)
    w = min(width, round((area * ratio) ** 0.5))
    h = min(height, round((area / ratio) ** 0.5))
    left, top = random.randint(0, width - w), random.randint(0, height - h)
    image = image.resize(
      (self._size, self._size),
      PIL.Image.Resampling.BILINEAR,
      box=(left, top, left + w, top + h),
    )
    if random.random() < 0.5:
      image = image.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image, np.float32) / 127.5 - 1, index % 4


def torch_loader(paths: Sequence[str], size: int) -> Iterator[Any]:
  """Returns batches of torch's DataLoader with one process per core."""
  import torch.utils.data

  loader = torch.utils.data.DataLoader(
    Images(paths, size),
    batch_size=_BATCH,
    sampler=torch.utils.data.RandomSampler(
      paths, replacement=True, num_samples=10**7
    ),
    num_workers=measure.cores(),
    # A fork would copy locks that other threads hold.
    multiprocessing_context="spawn",
  )
  return iter(loader)


def grain_loader(paths: Sequence[str], size: int) -> Iterator[Any]:
  """Returns batches of Grain with one process per core."""
  import grain
  from absl import flags

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags.
  dataset = grain.MapDataset.source(Images(paths, size)).shuffle(seed=0)
  # A worker reads ahead one batch of images; by default 500 of what it reads.
  images = dataset.repeat().to_iter_dataset(
    grain.ReadOptions(num_threads=16, prefetch_buffer_size=_BATCH)
  )
  options = grain.MultiprocessingOptions(num_workers=measure.cores())
  return iter(images.batch(_BATCH).mp_prefetch(options))


if __name__ == "__main__":
  main()
