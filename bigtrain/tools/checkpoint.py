"""Shows, verifies, exports and imports checkpoints.

  python -m bigtrain.tools.checkpoint show   PATH
  python -m bigtrain.tools.checkpoint verify PATH
  python -m bigtrain.tools.checkpoint export PATH OUT.npz --prefix=params
  python -m bigtrain.tools.checkpoint export PATH FOLDER --layout=llama
  python -m bigtrain.tools.checkpoint export PATH OUT --format=stablehlo
  python -m bigtrain.tools.checkpoint import PATH WORKDIR --config=FILE.py

PATH is a workdir or one of its checkpoints, such as run/checkpoints/00000100.
`show` and `verify` do not import jax. The PATH of `import` is a checkpoint of
T5X or big_vision, or whatever else config.model_init reads.

Exit codes: 0; 1 for a checkpoint that is damaged or cannot be read; 2 for a
wrong argument.
"""

import argparse
import json
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.checkpoints import averages, folders, integrity
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import (
  Array,
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean
from bigtrain.tools import exits, published_export

# Parameters that a model can be exported with.
_WEIGHTS = ("params", "ema")


def show(path: str, step: int | None = None, depth: int | None = None) -> str:
  """Returns the tree of a checkpoint as text, with shapes, dtypes and sizes.

  Args:
    step: step of the workdir's checkpoint; the newest unless given.
    depth: number of levels of the tree; all unless given.
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
  steps = folders.find_all(path)
  if len(steps) > 1:
    lines.append(f"steps in this workdir: {', '.join(map(str, steps))}")
  lines.append("")
  rows = list(_rows("", dict(manifest.arrays), 0, depth))
  width = max([len(row[0]) for row in rows], default=0)
  lines += [
    f"{name:<{width}}  {size:>9}  {content}".rstrip()
    for name, size, content in rows
  ]
  return "\n".join(lines)


def _rows(
  prefix: str, arrays: dict[str, Array], level: int, depth: int | None
) -> Iterator[tuple[str, str, str]]:
  """Yields (indented name, size, content) of each node below a prefix."""
  heads = dict.fromkeys(
    name.removeprefix(prefix).split("/")[0] for name in arrays
  )
  for head in heads:
    indented = "  " * level + head
    if prefix + head in arrays:
      array = arrays[prefix + head]
      yield indented, _size(array.num_bytes), f"{array}{_sharding(array)}"
      continue
    children = {
      name: array
      for name, array in arrays.items()
      if name.startswith(f"{prefix}{head}/")
    }
    count = sum(math.prod(a.shape) for a in children.values())
    size = sum(a.num_bytes for a in children.values())
    yield indented + "/", _size(size), f"{count:,} values"
    if depth is None or level + 1 < depth:
      yield from _rows(f"{prefix}{head}/", children, level + 1, depth)


def _sharding(array: Array) -> str:
  if not array.sharding or not any(array.sharding["spec"]):
    return ""
  return f"  sharded over {array.sharding['spec']}"


def _size(num_bytes: float) -> str:
  if num_bytes < 1000:
    return f"{num_bytes:.0f} B"
  power = min(4, int(math.log(num_bytes, 1000)))
  return f"{num_bytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def verify(path: str, step: int | None = None) -> dict[str, list[Any]]:
  """Returns {directory: problems} of one checkpoint or all of a workdir.

  Args:
    step: step of the workdir's checkpoint; all checkpoints unless given.
  """
  if step is not None:
    directories = [folders.find(path, step)]
  else:
    try:
      directories = list(folders.find_all(path).values())
    except DamagedError:
      directories = [path]  # A checkpoint with a damaged manifest.
  return {directory: integrity.verify(directory) for directory in directories}


def export(
  path: str, out: str, prefix: str = "", step: int | None = None
) -> int:
  """Writes arrays of a checkpoint into one file.

  Arrays keep their full names, such as "params/encoder/kernel", even with a
  prefix, so the file can be config.model_init; big_vision's .npz files use the
  same names. With the JSON file OUT.json beside it, bigtrain.load can use it.
  The .npz format has no bfloat16 or float8: these become float32, without
  loss.

  Args:
    out: path of the file, ending in .npz or .safetensors.
    prefix: tree to export, such as "params"; "" for all arrays.
    step: step of the workdir's checkpoint; the newest unless given.

  Returns:
    Number of arrays.

  Raises:
    ConfigError: the checkpoint has no such tree, or the file cannot hold a
      dtype.
    CheckpointError: the checkpoint is damaged or cannot be read.
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
    _write_about(f"{out}.json", manifest)
    os.replace(tmp, out)
  finally:
    if os.path.lexists(tmp):
      os.remove(tmp)
  return len(names)


def _write_about(path: str, manifest: Manifest) -> None:
  """Writes what a user of an export must know of the run, as JSON.

  This is the step, the config, and what the data calls things: names of the
  classes, tokenizer, shapes. `bigtrain.load` reads it beside a file.
  """
  host = manifest.host_state
  about = {
    "step": manifest.step,
    "config": host.config,
    "data": host.data,
    "fingerprints": host.fingerprints,
  }
  with paths.replacing(path) as file:
    json.dump(about, file, indent=2, sort_keys=True)
    file.write("\n")


def _arrays(
  directory: str, manifest: Manifest, names: Sequence[str]
) -> Iterator[np.ndarray]:
  parts = [
    (name, (slice(None),) * len(manifest.arrays[name].shape)) for name in names
  ]
  if any(name.startswith("opt/") for name in names):
    return integrity.read(directory, manifest, parts)  # A whole state.
  return averages.read(directory, manifest, parts)


def _write_npz(
  tmp: str, directory: str, manifest: Manifest, names: Sequence[str]
) -> None:
  with zipfile.ZipFile(tmp, "w", allowZip64=True) as archive:
    for name, array in zip(names, _arrays(directory, manifest, names)):
      if array.dtype.kind == "V":  # numpy's kind of ml_dtypes.
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
    description="Shows, verifies, exports and imports checkpoints.",
  )
  commands = parser.add_subparsers(dest="command", required=True)

  def command(name: str, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.add_argument(
      "path",
      help="a workdir, or one of its checkpoints, such as "
      "run/checkpoints/00000100",
    )
    sub.add_argument(
      "--step",
      type=int,
      help="step of the workdir's checkpoint (default: "
      f"{'all checkpoints' if name == 'verify' else 'the newest'})",
    )
    return sub

  sub = command(
    "show", "Prints the tree of arrays with shapes, dtypes and sizes."
  )
  sub.add_argument(
    "--depth", type=int, help="number of levels to show (default: all)"
  )
  command("verify", "Reads every byte and lists all damaged arrays.")
  sub = command(
    "export",
    "Writes arrays to one .npz or .safetensors file, or to a folder in a "
    "published layout.",
  )
  sub.add_argument(
    "out",
    help="file to write, ending in .npz or .safetensors; a new folder with "
    "--layout",
  )
  sub.add_argument(
    "--prefix",
    default="",
    help="tree to export, such as params or ema (default: all arrays; with "
    "--layout: params)",
  )
  sub.add_argument(
    "--layout",
    default="",
    help="published layout of the model, such as gpt2 or llama; writes "
    "model.safetensors and config.json for transformers",
  )
  sub.add_argument(
    "--format",
    default="",
    choices=("", "stablehlo"),
    help="stablehlo: a predict function with its parameters, which jax alone "
    "can run",
  )
  sub.add_argument(
    "--pred",
    default="",
    help="with --format: predict function to export (default: the first of "
    "caption, generate, logits, image, pre_logits that the task has)",
  )
  sub.add_argument(
    "--batch_size",
    type=int,
    help="with --format: number of examples of a call (default: any)",
  )
  sub.add_argument(
    "--platforms",
    default="cpu,cuda,tpu",
    help="with --format: platforms to run on (default: %(default)s)",
  )
  sub.add_argument(
    "--overwrite", action="store_true", help="replace an existing OUT"
  )
  sub = command(
    "import",
    "Writes a checkpoint of T5X or big_vision, or a file of parameters, as a "
    "checkpoint of a new workdir.",
  )
  sub.add_argument("out", help="workdir to write")
  sub.add_argument(
    "--config",
    default="",
    help="FILE.py[:arguments]: the parameters get the names and shapes of its "
    "model, and the workdir its config.json (default: all arrays as they are)",
  )
  return parser


def _check(args: argparse.Namespace) -> None:
  """Makes paths absolute; raises ConfigError for arguments out of range."""
  args.path = paths.absolute(args.path)
  if args.command == "import":
    args.out = paths.absolute(args.out)
    return  # Finds PATH itself: NAME.bv need not exist.
  if args.command == "export":
    args.out = paths.absolute(args.out)
  if not paths.exists(args.path):
    raise ConfigError(f"{args.path}: no such file or directory.")
  if args.step is not None:
    steps = folders.find_all(args.path)
    if args.step not in steps:
      raise ConfigError(
        f"--step={args.step}: no such checkpoint; {args.path} has "
        f"{', '.join(map(str, steps))}."
      )
  if args.command == "export":
    if args.format and (args.layout or args.prefix not in ("", *_WEIGHTS)):
      raise ConfigError(
        f"--format={args.format}: expected no --layout, and params or ema as "
        "--prefix."
      )
    one_file = not args.layout and not args.format
    if one_file and not args.out.endswith((".npz", ".safetensors")):
      raise ConfigError(
        f"{args.out}: expected a name ending in .npz or .safetensors."
      )
    if os.path.lexists(args.out) and not args.overwrite:
      raise ConfigError(
        f"{args.out}: already exists; give --overwrite to replace it."
      )
    folder = os.path.dirname(args.out)
    if not os.path.isdir(folder):
      raise ConfigError(f"{args.out}: no such folder {folder}.")


def _report(problems: Mapping[str, Sequence[Any]]) -> int:
  for directory, of_directory in problems.items():
    for problem in of_directory:
      print(f"DAMAGED {problem}")
    count = len(of_directory)
    print(f"{directory}: {f'{count} problem(s)' if count else 'intact'}")
  return 1 if any(problems.values()) else 0


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  args = _parser().parse_args(argv)
  _check(args)
  if args.command == "show":
    print(show(args.path, args.step, args.depth))
    return 0
  if args.command == "verify":
    return _report(verify(args.path, args.step))
  if args.command == "import":
    from bigtrain.tools import checkpoint_import

    written, count = checkpoint_import.run(
      args.path, args.out, args.config, args.step
    )
    print(f"{written}: {count} arrays")
    return 0
  if args.format:
    # Imports jax, which the other commands do without.
    from bigtrain.inference import stablehlo

    count, size = stablehlo.export(
      args.path,
      args.out,
      step=args.step,
      weights=args.prefix or "params",
      pred=args.pred,
      batch_size=args.batch_size,
      platforms=args.platforms.split(","),
    )
  elif args.layout:
    count, size = published_export.export(
      args.path, args.out, args.layout, args.prefix or "params", args.step
    )
    manifest = folders.read_manifest(folders.find(args.path, args.step))
    _write_about(os.path.join(args.out, "bigtrain.json"), manifest)
  else:
    count = export(args.path, args.out, args.prefix, args.step)
    size = os.path.getsize(args.out)
  print(f"{args.out}: {count} arrays, {_size(size)}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
