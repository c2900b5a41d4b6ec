"""Command lines of tools: changes of the config, flags of jax and absl."""

import jax
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.tools import arguments, generate, predict


def test_changes_flags_of_jax_and_arguments_are_told_apart():
  parser = arguments.JaxParser("tool", "A tool.", changes_config=True)
  parser.add_argument("--step", type=int)
  parser.add_argument("files", nargs="*")
  try:
    args, changes = parser.parse(
      ["--config.lr=1", "--jax_debug_infs", "--step", "3", "a", "b"]
    )
    assert jax.config.jax_debug_infs
  finally:
    jax.config.update("jax_debug_infs", False)
  assert (args.step, args.files, changes) == (3, ["a", "b"], ["lr=1"])


@pytest.mark.parametrize(
  ("word", "nearest"),
  [("--stp=3", "--step"), ("--jax_debug_nan", "--jax_debug_nans")],
)
def test_a_mistyped_flag_gets_the_nearest_one(word, nearest):
  parser = arguments.JaxParser("tool", "A tool.", changes_config=True)
  parser.add_argument("--step", type=int)
  with pytest.raises(ConfigError, match=f"Did you mean '{nearest}'"):
    parser.parse([word])


@pytest.mark.parametrize(
  ("tool", "words"),
  [
    (generate, ["--workdir=w", "--config.lr=1"]),
    (predict, ["run", "picture.png", "--config.lr=1"]),
    (generate, ["--workdir=w", "--verbosty=1"]),
  ],
)
def test_tools_refuse_what_they_do_not_take(tool, words, capsys):
  assert tool.main(words) == 2
  error = capsys.readouterr().err
  assert "changes no config" in error or "mean '--verbosity'" in error
