"""Benchmark 7: time from the command to the next step of a resumed run.

New processes run the command line with a warm compile cache. One starts in an
empty workdir; the others resume from checkpoints of step 100 and step 100,000.
The checkpoints come from real runs, with a changed step and with the log that
such runs would have written.

BIG_VISION=folder adds a checkout of big_vision, on the same JPEGs.
"""

import os
import tempfile

import numpy as np

from benchmarks import measure, startup

_SOON, _LATE = 100, 100_000
_PEER_NEWEST = "checkpoint.bv-LAST"  # big_vision's name of the newest step.


def main() -> None:
  """Prints the ratios."""
  args = measure.arguments(__doc__)
  config = os.path.join(measure.ROOT, "benchmarks", "synthetic.py")
  model = "mu/16,size=16" if args.quick else "S/16,size=64"
  _ours(f"{config}:{model}", model.split(",")[0], args.quick, args.repeats)
  _big_vision(args.quick, args.repeats)


def _ours(config: str, model: str, quick: bool, repeats: int) -> None:
  with tempfile.TemporaryDirectory() as folder:
    cache = os.path.join(folder, "cache")
    saved = os.path.join(folder, "saved")
    _save_step_1(config, saved, cache)
    workdirs = {}
    for step in (_SOON, _LATE):
      workdirs[step] = os.path.join(folder, f"step-{step}")
      _move(saved, workdirs[step], step)
    number = 0

    def warm() -> float:
      nonlocal number
      number += 1
      workdir = os.path.join(folder, f"new-{number}")
      return startup.first_step_secs(config, workdir, cache)

    def resume(step: int) -> float:
      return startup.first_step_secs(config, workdirs[step], cache)

    secs = measure.interleave(
      {
        "warm": warm,
        "soon": lambda: resume(_SOON),
        "late": lambda: resume(_LATE),
        "read": lambda: measure.timed(lambda: _read(workdirs[_SOON])),
      },
      repeats,
      warm_ups=not quick,
    )
  what = f"ViT-{model}, adam"
  measure.report(
    7,
    f"resume to next step / (warm start + reading the files): {what}",
    [
      resumed / (warm + read)
      for resumed, warm, read in zip(secs["soon"], secs["warm"], secs["read"])
    ],
    target="<= 1.3",
  )
  measure.report(
    7,
    f"resume at step {_LATE:,} / at step {_SOON}: {what}",
    measure.ratios(secs["late"], secs["soon"]),
    target="<= 1.1",
  )
  measure.report(7, f"resume to next step: {what}", secs["soon"], unit="s")


def _save_step_1(config: str, workdir: str, cache: str) -> None:
  """Runs and saves one step, and fills the compile cache."""
  list(
    measure.lines(
      "-m",
      "bigtrain.main",
      f"--config={config}",
      f"--workdir={workdir}",
      f"--config.compile_cache={cache}",
      "--config.stop_at_steps=1",
    )
  )


def _move(saved: str, workdir: str, step: int) -> None:
  """Writes the workdir of a run at another step."""
  from bigtrain.arrays import trees
  from bigtrain.checkpoints import checkpointer, folders, integrity
  from bigtrain.reports import log_entries, writers

  directory = folders.find(saved)
  manifest = folders.read_manifest(directory)
  whole = [
    (name, (slice(None),) * len(array.shape))
    for name, array in manifest.arrays.items()
  ]
  values = integrity.read(directory, manifest, whole)
  arrays = dict(zip(manifest.arrays, values))
  for name, array in arrays.items():
    if not array.shape and np.issubdtype(array.dtype, np.integer):
      arrays[name] = np.full_like(array, step)  # A counter of steps.
  folders.check_writable(workdir)
  saver = checkpointer.Checkpointer(
    workdir, config_digest=manifest.config_digest
  )
  saver.save(step, trees.from_flat(arrays), manifest.host_state)
  saver.close()
  every = manifest.host_state.config["log_steps"]
  (entry,) = log_entries.read(saved)
  writer = writers.Writers(workdir)
  for at in range(every, step + 1, every):
    writer.write({**entry, "step": at})
  writer.close()


def _read(workdir: str) -> None:
  """Reads all files of the newest checkpoint in turn."""
  from bigtrain.checkpoints import folders

  directory = folders.find(workdir)
  buffer = memoryview(bytearray(2**23))
  for path, _ in folders.files_below(directory):
    with open(os.path.join(directory, path), "rb", buffering=0) as file:
      while file.readinto(buffer):
        pass


def _big_vision(quick: bool, repeats: int) -> None:
  name = "resume to next step, big_vision / ours: ViT-S/16 on JPEGs"
  checkout, reason = startup.big_vision_checkout(quick)
  if reason:
    measure.skip(7, name, reason)
    return
  with tempfile.TemporaryDirectory() as folder:
    config, peer = startup.configs_with_big_vision(folder)
    workdirs = {n: os.path.join(folder, n) for n in ("ours", "peer")}
    caches = {n: os.path.join(folder, f"cache-{n}") for n in workdirs}
    _save_step_1(config, workdirs["ours"], caches["ours"])
    try:
      list(
        measure.lines(
          "-m",
          "big_vision.train",
          f"--config={peer},1",
          f"--workdir={workdirs['peer']}",
          env=startup.big_vision_environment(caches["peer"], checkout),
        )
      )
    except RuntimeError as e:
      # After its last save it calls functions that new versions of jax lack.
      if not os.path.exists(os.path.join(workdirs["peer"], _PEER_NEWEST)):
        measure.skip(7, name, str(e).splitlines()[-1])
        return
    secs = measure.interleave(
      {
        "peer": lambda: startup.big_vision_first_step_secs(
          peer, workdirs["peer"], caches["peer"], checkout
        ),
        "ours": lambda: startup.first_step_secs(
          config, workdirs["ours"], caches["ours"]
        ),
      },
      repeats,
    )
  measure.report(7, name, measure.ratios(secs["peer"], secs["ours"]))


if __name__ == "__main__":
  main()
