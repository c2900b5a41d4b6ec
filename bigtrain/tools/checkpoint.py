"""Looks into checkpoints: on a laptop, without devices and without jax.

  python -m bigtrain.tools.checkpoint show   PATH
  python -m bigtrain.tools.checkpoint verify PATH
  python -m bigtrain.tools.checkpoint export PATH OUT.npz --prefix=params
  python -m bigtrain.tools.checkpoint export PATH FOLDER --layout=llama

PATH is a workdir or one checkpoint of it, such as run/checkpoints/00000100.
The exit code is 0; 1 if a checkpoint is damaged or cannot be read; 2 for a
wrong argument.
"""

import argparse
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.checkpoints import folders, integrity, safetensors_files
from bigtrain.checkpoints.manifest import (
  Array,
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean
from bigtrain.tools import published


def show(path: str, step: int | None = None, depth: int | None = None) -> str:
  """The tree of a checkpoint, with shapes, dtypes and sizes, as text.

  Args:
    path: a checkpoint or a workdir.
    step: of the workdir; the newest unless given.
    depth: levels of the tree that are shown; all unless given.
  """
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  writer = manifest.writer
  lines = [
    f"{directory}: step {manifest.step:,}, {len(manifest.arrays):,} arrays, "
    f"{_size(manifest.num_bytes)}",
    f"written {writer.get('time')} on {writer.get('host')} by "
    f"{writer.get('processes')} process(es) with {writer.get('devices')} "
    f"device(s), jax {writer.get('jax')}",
  ]
  others = folders.find_all(path)
  if len(others) > 1:
    lines.append(f"steps of this workdir: {', '.join(map(str, others))}")
  lines.append("")
  rows = list(_rows("", dict(manifest.arrays), 0, depth))
  width = max([len(row[0]) for row in rows], default=0)
  lines += [
    f"{name:<{width}}  {size:>9}  {what}".rstrip() for name, size, what in rows
  ]
  return "\n".join(lines)


def _rows(
  prefix: str, arrays: dict[str, Array], level: int, depth: int | None
) -> Iterator[tuple[str, str, str]]:
  """(indented name, size, what it is) of each node below a prefix."""
  heads = dict.fromkeys(
    name.removeprefix(prefix).split("/")[0] for name in arrays
  )
  for head in heads:
    indented = "  " * level + head
    if prefix + head in arrays:
      array = arrays[prefix + head]
      yield indented, _size(array.num_bytes), f"{array}{_sharding(array)}"
      continue
    below = {
      name: array
      for name, array in arrays.items()
      if name.startswith(f"{prefix}{head}/")
    }
    count = sum(math.prod(a.shape) for a in below.values())
    size = sum(a.num_bytes for a in below.values())
    yield indented + "/", _size(size), f"{count:,} values"
    if depth is None or level + 1 < depth:
      yield from _rows(f"{prefix}{head}/", below, level + 1, depth)


def _sharding(array: Array) -> str:
  if not array.sharding or not any(array.sharding["spec"]):
    return ""
  return f"  split over {array.sharding['spec']}"


def _size(num_bytes: float) -> str:
  if num_bytes < 1000:
    return f"{num_bytes:.0f} B"
  power = min(4, int(math.log(num_bytes, 1000)))
  return f"{num_bytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def verify(path: str, step: int | None = None) -> dict[str, list[Any]]:
  """Problems of a checkpoint or of all of a workdir's, by directory.

  Args:
    path: a checkpoint or a workdir.
    step: of the workdir; all unless given.
  """
  if step is not None:
    there = [folders.find(path, step)]
  else:
    try:
      there = list(folders.find_all(path).values())
    except DamagedError:
      there = [path]  # Its manifest is what is damaged.
  return {directory: integrity.verify(directory) for directory in there}


def export(
  path: str, out: str, prefix: str = "", step: int | None = None
) -> int:
  """Writes arrays of a checkpoint into one file.

  Names stay as they are: "params/encoder/kernel", also with a prefix, so that
  the file can be config.model_init, and as big_vision names them in its .npz
  files. An .npz has no bfloat16 or float8: they become float32 there, which
  holds them exactly.

  Args:
    path: a checkpoint or a workdir.
    out: ends with .npz or .safetensors.
    prefix: only the tree of this name, such as "params"; "" for all.
    step: of the workdir; the newest unless given.

  Returns:
    Number of arrays.
  """
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  prefix = prefix.strip("/")
  names = [
    name
    for name in manifest.arrays
    if not prefix or name == prefix or name.startswith(prefix + "/")
  ]
  if not names:
    tops = {name.split("/")[0] for name in manifest.arrays}
    hint = did_you_mean(prefix, tops)
    raise ConfigError(f"--prefix={prefix}: no such tree in {directory}.{hint}")
  problems = integrity.inspect(directory, manifest, names)
  if problems:
    raise CheckpointError(f"{directory}: damaged: {problems[0]}")
  write = _write_npz if out.endswith(".npz") else _write_safetensors
  tmp = f"{out}.tmp"
  try:
    write(tmp, directory, manifest, names)
    os.replace(tmp, out)
  finally:
    if os.path.lexists(tmp):
      os.remove(tmp)
  return len(names)


def _arrays(
  directory: str, manifest: Manifest, names: Sequence[str]
) -> Iterator[np.ndarray]:
  parts = [
    (name, (slice(None),) * len(manifest.arrays[name].shape)) for name in names
  ]
  return integrity.read(directory, manifest, parts)


def _write_npz(
  tmp: str, directory: str, manifest: Manifest, names: Sequence[str]
) -> None:
  with zipfile.ZipFile(tmp, "w", allowZip64=True) as archive:
    for name, array in zip(names, _arrays(directory, manifest, names)):
      if array.dtype.kind == "V":  # What ml_dtypes look like to numpy.
        array = array.astype(np.float32)
      with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _write_safetensors(
  tmp: str, directory: str, manifest: Manifest, names: Sequence[str]
) -> None:
  specs = {
    n: (manifest.arrays[n].shape, manifest.arrays[n].dtype) for n in names
  }
  arrays = _arrays(directory, manifest, names)
  try:
    safetensors_files.write(tmp, specs, arrays, {"step": str(manifest.step)})
  except ValueError as e:
    raise ConfigError(f"{e}.") from e


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m bigtrain.tools.checkpoint",
    description="Looks into checkpoints, without devices.",
  )
  commands = parser.add_subparsers(dest="command", required=True)

  def command(name: str, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.add_argument("path", help="a workdir, or one checkpoint of it")
    sub.add_argument(
      "--step",
      type=int,
      help="of the workdir's checkpoint (default: "
      f"{'all' if name == 'verify' else 'the newest'})",
    )
    return sub

  sub = command("show", "Prints the tree with shapes, dtypes and sizes.")
  sub.add_argument("--depth", type=int, help="levels to show (default: all)")
  command("verify", "Reads every byte and names whatever is damaged.")
  sub = command("export", "Writes arrays to one .npz or .safetensors file.")
  sub.add_argument(
    "out",
    help="the file; ends with .npz or .safetensors; with --layout a new folder",
  )
  sub.add_argument(
    "--prefix",
    default="",
    help="only this tree, such as params or ema (default: everything)",
  )
  sub.add_argument(
    "--layout",
    default="",
    help="names and shapes in which models of this kind are published, such as "
    "gpt2 or llama: a folder that transformers opens",
  )
  sub.add_argument(
    "--overwrite", action="store_true", help="replace OUT if it is there"
  )
  return parser


def _check(args: argparse.Namespace) -> None:
  """Makes paths absolute; raises ConfigError for arguments out of range."""
  args.path = paths.absolute(args.path)
  if args.command == "export":
    args.out = paths.absolute(args.out)
  if not paths.exists(args.path):
    raise ConfigError(f"{args.path}: no such file or directory.")
  if args.step is not None:
    there = folders.find_all(args.path)
    if args.step not in there:
      raise ConfigError(
        f"--step={args.step}: {args.path} has {', '.join(map(str, there))}."
      )
  if args.command == "export":
    if not args.layout and not args.out.endswith((".npz", ".safetensors")):
      raise ConfigError(f"{args.out}: expected .npz or .safetensors.")
    if os.path.lexists(args.out) and not args.overwrite:
      raise ConfigError(f"{args.out}: is there already; --overwrite?")
    folder = os.path.dirname(args.out)
    if not os.path.isdir(folder):
      raise ConfigError(f"{args.out}: no such folder {folder}.")


def _report(problems: Mapping[str, Sequence[Any]]) -> int:
  for directory, found in problems.items():
    for problem in found:
      print(f"DAMAGED {problem}")
    print(f"{directory}: {f'{len(found)} problem(s)' if found else 'whole'}")
  return 1 if any(problems.values()) else 0


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  args = _parser().parse_args(argv)
  try:
    _check(args)
    if args.command == "show":
      print(show(args.path, args.step, args.depth))
      return 0
    if args.command == "verify":
      return _report(verify(args.path, args.step))
    if args.layout:
      count, size = published.export(
        args.path, args.out, args.layout, args.prefix or "params", args.step
      )
    else:
      count = export(args.path, args.out, args.prefix, args.step)
      size = os.path.getsize(args.out)
    print(f"{args.out}: {count} arrays, {_size(size)}")
    return 0
  except BrokenPipeError:  # show | head
    sys.stderr.close()
    return 0
  except ConfigError as e:
    print(f"error: {e}", file=sys.stderr)
    return 2
  except (CheckpointError, OSError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
