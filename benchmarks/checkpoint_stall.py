"""Benchmark 6: stall, write time and slowdown of asynchronous checkpoints.

bigtrain.checkpoints saves the state of a ViT-S/16 with Adam, on one device and
on eight simulated ones, as main.py does; the peers are the asynchronous
checkpoints of Orbax and torch. The state comes from real steps, because zeros
would compress.

All write to the temporary folder and wait for the disk. Checkpoints are removed
between turns.
"""

import concurrent.futures
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from benchmarks import measure

# (devices, arguments of the model). Without scan, each layer's arrays are
# separate files: hundreds of small ones.
_CASES = ((1, ""), (8, ""), (1, ",scan"))


def main() -> None:
  """Prints the figures of each case."""
  args = measure.arguments(
    __doc__,
    devices="number of devices to simulate (default: all cases, in new "
    "processes)",
    model="further arguments of the model, such as ,scan",
  )
  if args.devices or args.quick:
    number = int(args.devices or 2)
    measure.simulate_devices(number)
    _measure(number, args.model or "", args.quick, args.repeats)
    return
  for number, more in _CASES:
    flags = (f"--devices={number}", f"--repeats={args.repeats}")
    flags += (f"--model={more}",)
    for line in measure.lines("-m", "benchmarks.checkpoint_stall", *flags):
      if line.startswith('{"benchmark"'):
        print(line, flush=True)


class _Saver(Protocol):
  """A library that saves a state in the background."""

  def start(self, state: Any) -> None:
    """Returns when the state may be donated."""

  def wait(self) -> None:
    """Returns when the checkpoint is complete and on the disk."""

  def close(self) -> None:
    """Releases all resources."""


class _Turn(NamedTuple):
  """Measurements of one save.

  Attributes:
    stall: seconds that the save blocked its caller.
    write: seconds from then until the checkpoint was on disk.
    slowdown: time of a step during the save / of a step without one.
    copy: seconds to copy the same number of bytes to the host.
    plain_write: seconds to write the same number of bytes to one file.
  """

  stall: float
  write: float
  slowdown: float
  copy: float
  plain_write: float


def _measure(number: int, more: str, quick: bool, repeats: int) -> None:
  import jax

  from benchmarks import limits, program, synthetic

  model = "mu/16,size=16" if quick else "S/16,size=64"
  variant = model.split(",")[0] + more.replace(",", ", ")
  what = f"ViT-{variant}, adam, {number} device(s)"
  if jax.device_count() != number:
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    measure.skip(6, f"stall, write and steps: {what}", f"this is {devices}")
    return
  config = synthetic.get_config(f"{model}{more},batch_size={max(2, number)}")
  config.mesh = dict(replica=1, fsdp=number)
  built = program.build(config)
  built.run(1)  # Now the state is an output of the update.
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(built.state))
  on_cpu = jax.devices()[0].platform == "cpu"
  mib = max(1, round(num_bytes / 2**20))

  with tempfile.TemporaryDirectory() as folder:
    savers = _savers(folder, built.state, number, quick)
    copy_rate = (limits.memory_copy if on_cpu else limits.device_copy)(mib)
    write_rate = limits.disk_write(mib, folder)

    def turn(saver: _Saver) -> Callable[[], _Turn]:
      return lambda: _Turn(
        *_save(saver, built),
        _slowdown(saver, built),
        1e-9 * num_bytes / copy_rate(),
        1e-9 * num_bytes / write_rate(),
      )

    calls = {name: turn(saver) for name, saver in savers.items()}
    turns = measure.interleave(calls, repeats, warm_ups=not quick)
    for saver in savers.values():
      saver.close()

  ours = turns.pop("ours")
  _report(what, ours, num_bytes, on_cpu)
  for peer, theirs in turns.items():
    _compare(f"ours / {peer}: {what}", ours, theirs)
    name = f"step while {peer} writes / quiet: {what}"
    measure.report(6, name, [turn.slowdown for turn in theirs])


def _report(what: str, ours: list[_Turn], num_bytes: int, on_cpu: bool) -> None:
  measure.report(6, f"state: {what}", [num_bytes / 2**20], unit="MiB")
  # On CPU, copies and writes compete with the steps for cores.
  measure.report(
    6,
    f"stall / (state bytes / copy rate): {what}",
    [turn.stall / turn.copy for turn in ours],
    target=None if on_cpu else "<= 1.5",
  )
  measure.report(
    6,
    f"stall / synchronous save: {what}",
    [turn.stall / (turn.stall + turn.write) for turn in ours],
    target="<= 0.2" if on_cpu else "<= 0.05",
  )
  measure.report(
    6,
    f"write / plain write of as many bytes: {what}",
    [turn.write / turn.plain_write for turn in ours],
    target="<= 1.3",
  )
  measure.report(
    6,
    f"step while writing / quiet: {what}",
    [turn.slowdown for turn in ours],
    target=None if on_cpu else "<= 1.05",
  )


def _compare(name: str, ours: list[_Turn], theirs: list[_Turn]) -> None:
  pairs = list(zip(ours, theirs))
  stalls = [a.stall / b.stall for a, b in pairs]
  measure.report(6, f"stall, {name}", stalls)
  wholes = [(a.stall + a.write) / (b.stall + b.write) for a, b in pairs]
  measure.report(6, f"save until it is on the disk, {name}", wholes)


def _save(saver: _Saver, built: Any) -> tuple[float, float]:
  """Returns the seconds of (stall, write) of a save without steps."""
  import jax

  jax.block_until_ready(built.state)
  start_secs = time.perf_counter()
  saver.start(built.state)
  stalled = time.perf_counter()
  saver.wait()
  return stalled - start_secs, time.perf_counter() - stalled


def _slowdown(saver: _Saver, built: Any) -> float:
  """Returns time of steps during a save / of as many steps after it."""
  secs: list[float] = []
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    saver.start(built.state)
    waiting = pool.submit(saver.wait)
    while not waiting.done():
      secs.append(built.run(1))
    waiting.result()
  if len(secs) > 1:
    secs.pop()  # The save ended during this step.
  return sum(secs) / sum(built.run(1) for _ in secs)


def _savers(
  folder: str, state: Any, number: int, quick: bool
) -> dict[str, _Saver]:
  """Returns ours and the installed peers; reports the others as skipped."""
  savers: dict[str, _Saver] = {"ours": _Ours(os.path.join(folder, "ours"))}
  peers: dict[str, tuple[str, Callable[[str], _Saver]]] = {
    "Orbax": ("orbax", _Orbax)
  }
  if number == 1:  # With one process, torch has no shards.
    peers["torch"] = ("torch", lambda path: _Torch(path, state))
  for peer, (module, make) in peers.items():
    reason = "not in --quick" if quick else measure.missing(module)
    if reason:
      measure.skip(6, f"stall, ours / {peer}: {number} device(s)", reason)
    else:
      savers[peer] = make(os.path.join(folder, peer))
  return savers


class _Ours:
  """bigtrain.checkpoints."""

  def __init__(self, folder: str):
    from bigtrain.checkpoints import checkpointer, folders

    self._workdir = folder
    folders.check_writable(folder)
    self._checkpointer = checkpointer.Checkpointer(folder)
    self._step = 0

  def start(self, state: Any) -> None:
    self._step += 1
    self._checkpointer.save(self._step, state)

  def wait(self) -> None:
    from bigtrain.checkpoints import folders

    self._checkpointer.wait()
    folders.discard(folders.find(self._workdir))

  def close(self) -> None:
    self._checkpointer.close()


class _Orbax:
  """Orbax's StandardCheckpointer with its defaults."""

  def __init__(self, folder: str):
    import orbax.checkpoint as ocp

    self._folder = folder
    self._checkpointer = ocp.StandardCheckpointer()

  def start(self, state: Any) -> None:
    self._checkpointer.save(self._folder, state)

  def wait(self) -> None:
    self._checkpointer.wait_until_finished()
    shutil.rmtree(self._folder)

  def close(self) -> None:
    self._checkpointer.close()


class _Torch:
  """torch.distributed.checkpoint.async_save of tensors of the same values."""

  def __init__(self, folder: str, state: Any):
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp

    from bigtrain.arrays import trees

    self._folder = folder
    on_gpu = torch.cuda.is_available()
    # Reuses the memory of its copies, as ours does; needs pinned memory.
    self._writer = dcp.FileSystemWriter(folder, cache_staged_state_dict=on_gpu)
    device = "cuda" if on_gpu else "cpu"
    self._tensors = {
      name: torch.from_numpy(np.array(x)).to(device)
      for name, x in trees.flatten_with_names(state)
    }
    torch.distributed.init_process_group(
      "gloo", init_method=f"file://{folder}.store", rank=0, world_size=1
    )

  def start(self, state: Any) -> None:
    del state  # torch saves its own copy.
    import torch.distributed.checkpoint as dcp

    self._future = dcp.async_save(self._tensors, storage_writer=self._writer)

  def wait(self) -> None:
    self._future.result()
    shutil.rmtree(self._folder)

  def close(self) -> None:
    import torch

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
  main()
