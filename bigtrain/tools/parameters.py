"""Shows which parameters a config trains, and how, without training.

  python -m bigtrain.tools.parameters --config=chats.py
  python -m bigtrain.tools.parameters --config=chats.py --config.adapters.rank=8

It prints a line for each trained parameter: its name, where * stands for the
numbers of blocks that are alike, its shape, the number of its values, its
largest learning rate and its weight decay. Then it prints how many values are
trained and how many are frozen. The data is opened, but nothing is compiled or
written.

Exit codes: 0; 2 for a mistake in the config or the arguments; 1 otherwise.
"""

import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.arrays import trees
from bigtrain.config import loading
from bigtrain.models.layers import lora
from bigtrain.optim import recipe
from bigtrain.optim.recipe import Leaf, Recipe
from bigtrain.runtime.run import Run
from bigtrain.tools import arguments, exits

_HEADER = ("parameter", "shape", "values", "learning rate", "weight decay")


class _Row(NamedTuple):
  """Parameters that differ only in the numbers of their blocks."""

  name: str
  shape: tuple[int, ...]
  lr: float
  wd: float


def overview(config: Any) -> str:
  """The table of what a config trains."""
  import bigtrain.main  # This takes seconds, which --help does without.

  with tempfile.TemporaryDirectory(prefix="bigtrain-parameters-") as folder:
    return bigtrain.main.train(config, folder, on_update=_overview)


def _overview(
  run: Run,
  update_fn: Callable[..., Any],
  specs: tuple[Any, ...],
  compile: Callable[[], Any],
) -> str:
  """`overview`, for main's `on_update`."""
  del update_fn, compile
  state, *_, frozen = specs
  rules = recipe.read(run.config, state["params"], run.lengths.units)
  shapes = dict(trees.flatten_with_names(state["params"]))
  rows: dict[_Row, list[str]] = {}
  for name, leaf in rules.leaves.items():
    pattern = re.sub(r"(blocks?_)\d+/", r"\1*/", name)
    shape = tuple(shapes[name].shape)
    lr, wd = _rates(rules, leaf)
    rows.setdefault(_Row(pattern, shape, lr, wd), []).append(name)
  table = [_HEADER, *_lines(rows)]
  widths = [max(map(len, column)) for column in zip(*table)]
  lines = [
    "  ".join([x.ljust(n) for x, n in zip(line, widths)]).rstrip()
    for line in table
  ]
  trained = {name: shapes[name] for name in rules.leaves}
  others = {name: x for name, x in shapes.items() if name not in rules.leaves}
  lines += ["", f"trained: {_total(trained)}"]
  kept = {"by config.schedule": others, **frozen}
  lines += [f"frozen ({name}): {_total(x)}" for name, x in kept.items() if x]
  return "\n".join(lines)


def _rates(rules: Recipe, leaf: Leaf) -> tuple[float, float]:
  """The largest learning rate of a parameter, and its weight decay."""
  return rules.lr * leaf.lr_mult, rules.wd * (leaf.wd_mult or 0.0)


def _lines(rows: Mapping[_Row, Sequence[str]]) -> Iterator[tuple[str, ...]]:
  for row, names in rows.items():
    times = f" ({len(names)} x)" if len(names) > 1 else ""
    yield (
      row.name + times,
      f"[{', '.join(map(str, row.shape))}]",
      f"{len(names) * math.prod(row.shape):,}",
      f"{row.lr:g}",
      f"{row.wd:g}" if row.wd else "-",
    )


def _total(tree: Any) -> str:
  values = _leaves(lora.unquantized(tree))  # Not the codes of quantized ones.
  number = sum(math.prod(x.shape) for x in values)
  size = trees.num_bytes(_leaves(tree))
  return f"{number:,} values in {len(values):,} arrays, {size:,} bytes"


def _leaves(tree: Any) -> list[Any]:
  return [x for _, x in trees.flatten_with_names(tree)]


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  parser = arguments.JaxParser("parameters", __doc__, changes_config=True)
  parser.add_argument(
    "--config", required=True, help="FILE.py or FILE.py:arguments"
  )
  args, changes = parser.parse(argv)
  print(overview(loading.load(args.config, changes)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
