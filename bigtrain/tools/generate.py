"""Continues a text with a language model of a run, as it is written.

  python -m bigtrain.tools.generate --workdir=runs/pydoc_lm \\
      --prompt="The with statement" --max_new=500 --temperature=0.8

The model is that of the checkpoint's own config. A text may become longer than
the model reads at a time: then it goes on with the second half of what it has
read in view.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import decoding, sharding
from bigtrain.checkpoints import folders, warm_start
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError
from bigtrain.tasks import language_modeling
from bigtrain.tools import published


def generate(
  path: str,
  prompt: str,
  *,
  max_new: int = 256,
  temperature: float = 0.8,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  step: int | None = None,
  prefix: str = "params",
  tokenizer: str | None = None,
  bos: bool = False,
) -> Iterator[str]:
  """Yields what follows the prompt, in pieces as they are written.

  Args:
    path: a workdir or a checkpoint.
    prompt: the text to continue; may be empty if the tokenizer has a token
      that begins a text.
    max_new: tokens at most.
    temperature: see decoding.sample; 0 is greedy.
    top_k: see there.
    top_p: see there.
    seed: another one, another text.
    step: of the workdir; the newest unless given.
    prefix: which parameters: "params" or "ema".
    tokenizer: as preprocessing has it; that of the run's data unless given.
    bos: begin with the token that begins a text; always, if prompt is empty.

  Raises:
    ConfigError: no such checkpoint, tokenizer or option.
    CheckpointError: a checkpoint that is damaged or cannot be read.
  """
  decoding.check_sampling(temperature, top_k, top_p)
  directory = folders.find_named(path, step, "--workdir")
  manifest = folders.read_manifest(directory)
  module, model = published.model_of(manifest, directory)
  config = manifest.host_state.config
  if config.get("task") != "language_modeling":
    raise ConfigError(
      f"{directory}: its task is {config.get('task')!r}; only language models "
      "continue texts."
    )
  words = tokenizers.get(tokenizer or _tokenizer_of(config))
  if words.vocab_size > model.vocab_size:
    raise ConfigError(
      f"--tokenizer: it has {words.vocab_size} tokens, the model "
      f"{model.vocab_size}."
    )
  ids = words.encode(prompt).tolist()
  if bos or not ids:
    if words.bos_id is None:
      raise ConfigError("--prompt: the tokenizer has nothing to begin with.")
    ids = [words.bos_id, *ids]
  params = _params(directory, prefix, module, model)
  options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
  shown, new = 0, []
  for token in _tokens(params, model, ids, max_new, seed, options):
    if token == words.eos_id:
      break
    new.append(token)
    text = words.decode(new)
    # The rest of a character may be in the next token.
    if not text.endswith("\N{REPLACEMENT CHARACTER}"):
      yield text[shown:]
      shown = len(text)
  yield words.decode(new)[shown:]


def _tokenizer_of(config: Mapping[str, Any]) -> str:
  """The tokenizer of the data that a model was trained on."""
  data = config.get("input", {}).get("data", {})
  if data.get("tokenizer"):
    return data["tokenizer"]
  if data.get("type") == "text":
    return "bytes"
  raise ConfigError("--tokenizer: the run's config names none; give it.")


def _params(directory: str, prefix: str, module: Any, model: Any) -> Any:
  """Parameters, split over all devices."""
  shapes = jax.eval_shape(
    model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  places, _ = sharding.state_shardings(shapes, sharding.make_mesh())
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    places,
  )
  params, _ = warm_start.load_params(
    dict(path=directory, prefix=prefix),
    like,
    convert=getattr(module, "from_published", None),
    key="--workdir",
  )
  return params


def _tokens(
  params: Any,
  model: Any,
  ids: list[int],
  max_new: int,
  seed: int,
  options: dict[str, Any],
) -> Iterator[int]:
  """The tokens that follow, one after the other."""
  size = len(ids) + max_new
  if model.max_len is not None:
    size = min(size, model.max_len)
  keys_1 = jax.random.key(seed)[None]

  @jax.jit
  def read(params: Any, tokens_1L: jax.Array) -> Any:
    cache = model.init_cache(1, size)
    variables = {"params": params}
    return model.apply(variables, tokens_1L, cache=cache, head=False)[1][
      "cache"
    ]

  @functools.partial(jax.jit, donate_argnums=1)
  def write(
    params: Any, cache: Any, token: Any, position: Any, number: Any
  ) -> Any:
    logits, cache = language_modeling.step_fn(
      {"params": params}, model, cache, token[None], position
    )
    return decoding.choose(logits, keys_1, number, **options)[0], cache

  seen, cache, position = list(ids), None, 0
  for number in range(max_new):
    if cache is None or position == size:
      # The last token is not read but handed to `write`, and so is what comes
      # after: it takes the place of the padding.
      view = seen[-size // 2 :] if len(seen) >= size else seen
      padded = np.zeros((1, size), np.int32)
      padded[0, : len(view) - 1] = view[:-1]
      cache, position = read(params, padded), len(view) - 1
      token: Any = jnp.asarray(view[-1], jnp.int32)
    token, cache = write(params, cache, token, position, number)
    position += 1
    seen.append(int(token))
    yield seen[-1]


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m bigtrain.tools.generate",
    description="Continues a text with the language model of a run.",
  )
  add: Callable[..., Any] = parser.add_argument
  add("--workdir", required=True, help="a workdir, or a checkpoint of it")
  add("--prompt", default="", help="the text to continue")
  add("--max_new", type=int, default=256, help="tokens at most (%(default)s)")
  add(
    "--temperature",
    type=float,
    default=0.8,
    help="0 takes the likeliest token (%(default)s)",
  )
  add("--top_k", type=int, default=0, help="of so many likeliest; 0: of all")
  add("--top_p", type=float, default=1.0, help="of the likeliest that add up")
  add("--seed", type=int, default=0, help="another one, another text")
  add("--step", type=int, help="of the workdir (default: the newest)")
  add("--prefix", default="params", help="params or ema (%(default)s)")
  add("--tokenizer", help="'bytes' or a path (default: that of the run's data)")
  add("--bos", action="store_true", help="begin as texts begin in training")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  args = vars(_parser().parse_args(argv))
  path = args.pop("workdir")
  try:
    sys.stdout.write(args["prompt"])
    for piece in generate(path, args.pop("prompt"), **args):
      sys.stdout.write(piece)
      sys.stdout.flush()
    print()
    return 0
  except BrokenPipeError:  # generate | head
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
