"""Continues a text with the language model of a run, or a published one.

  python -m bigtrain.tools.generate --workdir=runs/pydoc_lm \\
      --prompt="The with statement" --max_new=500 --temperature=0.8
  python -m bigtrain.tools.generate --model=models/SmolLM2-135M-Instruct \\
      --chat --prompt="Why is the sky blue?"
  python -m bigtrain.tools.generate --model=models/paligemma2-3b-mix-224 \\
      --image=street.jpg --prompt="caption en"

The text is printed while it is generated; with pictures, once it is complete.
Decoding is as in bigtrain.load: it follows the generation_config.json of a
published folder, and is greedy without one; a line on stderr says which. The
config in the checkpoint defines the model. When the text reaches the model's
context length, generation continues with the second half of the context.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays.types import Variables
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.inference import ops, picture_prompts, saved
from bigtrain.objective import building
from bigtrain.tasks import language_modeling
from bigtrain.text import decoding, tokenizers
from bigtrain.tools import arguments, exits

_TASKS = ("language_modeling", "policy_gradient")


def generate(
  path: str,
  prompt: str,
  *,
  max_new: int = 256,
  num_beams: int = 1,
  length_penalty: float = 0.0,
  seed: int = 0,
  step: int | None = None,
  prefix: str = "params",
  tokenizer: str | None = None,
  bos: bool = False,
  chat: bool = False,
  image: Sequence[str] = (),
  **given: float | None,
) -> Iterator[str]:
  """Yields the text that follows a prompt, piece by piece.

  With beam search or a prompt with pictures, it yields the whole text at the
  end. See the command line for the arguments; `given` has the options of
  sampling.
  """
  check_choice("--prefix", prefix, saved.WEIGHTS)
  checkpoint = saved.find(path, step, "--workdir or --model")
  sampling, rules = _options(checkpoint.generation, num_beams, given)
  how = _description(sampling, rules, num_beams, seed)
  config = checkpoint.config
  if config.get("task") not in _TASKS:
    raise ConfigError(
      f"{checkpoint.path}: its task is {config.get('task')!r}; expected "
      f"{' or '.join(map(repr, _TASKS))}."
    )
  has_prefix = checkpoint.data.get("prompts", {}).get("prefix")
  if has_prefix and not image:
    raise ConfigError(
      f"{checkpoint.path}: a prefix language model reads a prompt as a whole, "
      "not token by token; use bigtrain.load(...).generate."
    )
  _, model = building.model(settings.Config(config))
  codec = ops.tokenizer(checkpoint, tokenizer)
  if codec is None:
    raise ConfigError(
      f"--tokenizer: missing, and {checkpoint.path} names no tokenizer; "
      "expected the path of one, or 'bytes'."
    )
  features: dict[str, Any] = {}
  messages = [{"role": "user", "content": prompt}]
  if image:
    whole = {"messages": messages} if chat else {"text": prompt}
    ids, features = _with_pictures(checkpoint, codec, whole, image)
  elif chat:
    ids = checkpoint.ids_of_chat(codec, messages)
  else:
    bos = bos or checkpoint.adds_bos(codec)
    ids = _prompt_ids(codec, model, prompt, bos)
  ends = decoding.eos_ids(checkpoint.generation.get("eos_id", codec.eos_id))
  variables = saved.variables(checkpoint, prefix, sharding.make_mesh())
  if num_beams > 1 or image:
    options = dict(
      num_beams=num_beams,
      length_penalty=length_penalty,
      seed=seed,
      **sampling,
      **rules._asdict(),
    )
    stream: Iterable[int] = _whole(
      variables, model, ids, features, max_new, ends, options
    )
  else:
    apply_rules = functools.partial(
      rules.apply, ends=jnp.asarray(ends, jnp.int32)
    )
    stream = _sample(
      variables, model, ids, max_new, seed, sampling, apply_rules
    )
  print(how, file=sys.stderr, flush=True)
  yield from _pieces(codec, stream, ends)


def _pieces(
  codec: tokenizers.Tokenizer, stream: Iterable[int], ends: Sequence[int]
) -> Iterator[str]:
  new: list[int] = []
  num_yielded = 0  # Characters.
  for token in stream:
    if token in ends:
      break
    new.append(token)
    text = codec.decode(new)
    # A character can span several tokens: wait for the rest of it.
    if not text.endswith("\N{REPLACEMENT CHARACTER}"):
      yield text[num_yielded:]
      num_yielded = len(text)
  yield codec.decode(new)[num_yielded:]


def _with_pictures(
  checkpoint: saved.Saved,
  codec: tokenizers.Tokenizer,
  prompt: Mapping[str, Any],
  image: Sequence[str],
) -> tuple[list[int], dict[str, Any]]:
  """Returns the ids of a prompt, and its other features."""
  prompt = {**prompt, "images": [*image]}
  prepared = picture_prompts.PicturePrompts(checkpoint, codec)
  features: dict[str, Any] = prepared.features([prompt])
  if checkpoint.data["prompts"].get("prefix"):
    features["prefix"] = np.zeros(1, np.int32)
  return prepared.ids(prompt).tolist(), features


def _options(
  generation: Mapping[str, Any], num_beams: int, given: Mapping[str, Any]
) -> tuple[dict[str, Any], decoding.Rules]:
  """Returns the options of `decoding.choose`, and the repetition rules.

  Each option is the one given, else the one saved with the model, else a
  default.
  """
  options = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    **decoding.NO_RULES._asdict(),
  }
  options |= {name: x for name, x in generation.items() if name in options}
  if num_beams > 1:
    options["temperature"] = 0.0  # A beam search does not sample.
  options |= {name: x for name, x in given.items() if x is not None}
  limits = ("top_k", "top_p", "min_p")
  sampling: dict[str, Any] = {
    name: options.pop(name) for name in ("temperature", *limits)
  }
  decoding.check_sampling(**sampling)
  decoding.check_beams(num_beams, sampling["temperature"], "--num_beams")
  for name in limits:
    if given.get(name) is not None and not sampling["temperature"]:
      raise ConfigError(
        f"--{name}={given[name]}: expected --temperature above 0 with it; "
        "otherwise the most likely token is taken."
      )
  rules = decoding.Rules(**options)  # type: ignore[arg-type]
  rules.check()
  return sampling, rules


def _description(
  sampling: Mapping[str, Any], rules: decoding.Rules, num_beams: int, seed: int
) -> str:
  """A line that says how the text is decoded."""
  parts = ["the most likely token"]
  if num_beams > 1:
    parts = [f"beam search, num_beams={num_beams}"]
  elif sampling["temperature"]:
    parts = [f"sampling, temperature={sampling['temperature']:g}"]
    if sampling["top_k"]:
      parts.append(f"top_k={sampling['top_k']}")
    if sampling["top_p"] < 1:
      parts.append(f"top_p={sampling['top_p']:g}")
    if sampling["min_p"]:
      parts.append(f"min_p={sampling['min_p']:g}")
    parts.append(f"seed={seed}")
  for name, value in rules._asdict().items():
    if value == getattr(decoding.NO_RULES, name):
      continue
    is_number = isinstance(value, int | float)
    parts.append(f"{name}={value:g}" if is_number else name)
  return f"decoding: {', '.join(parts)}"


def _prompt_ids(
  codec: tokenizers.Tokenizer, model: Any, prompt: str, bos: bool
) -> list[int]:
  """Tokens of the prompt. An empty prompt needs the begin token."""
  if codec.vocab_size > model.vocab_size:
    raise ConfigError(
      f"--tokenizer: has {codec.vocab_size} tokens, more than the model's "
      f"{model.vocab_size}."
    )
  ids = codec.encode(prompt).tolist()
  if not bos and ids:
    return ids
  if codec.bos_id is None:
    name = "--bos" if bos else "--prompt: empty"
    raise ConfigError(f"{name}: the tokenizer has no begin token.")
  return [codec.bos_id, *ids]


def _whole(
  variables: Variables,
  model: Any,
  ids: list[int],
  features: Mapping[str, Any],
  max_new: int,
  eos_id: tuple[int, ...],
  options: dict[str, Any],
) -> list[int]:
  """Returns all new tokens of a beam search, or of a prompt with pictures."""
  size = len(ids) + max_new
  if model.max_len is not None and size > model.max_len:
    raise ConfigError(
      f"--max_new: expected at most {model.max_len - len(ids)} in a beam "
      "search or with pictures, the positions after the prompt, got "
      f"{max_new}."
    )
  search = functools.partial(
    language_modeling.generate,
    model=model,
    max_new=max_new,
    eos_id=eos_id,
    pad_id=-1,  # The prompt has no padding.
    **options,
  )
  batch = {"tokens": np.asarray([ids]), **features}
  new_1N = jax.jit(search)(variables, batch)
  return [token for token in new_1N[0].tolist() if token >= 0]


def _sample(
  variables: Variables,
  model: Any,
  ids: list[int],
  max_new: int,
  seed: int,
  options: dict[str, Any],
  apply_rules: Callable[..., jax.Array],
) -> Iterator[int]:
  """Yields tokens that follow `ids`.

  `read` fills the cache with the text so far, and `write` adds a token. Legend:
  a leading 1 is the batch of one text, L the length of the context, N the
  number of prompt and new tokens.
  """
  size = len(ids) + max_new  # Of the cache.
  if model.max_len is not None:
    size = min(size, model.max_len)
  keys_1 = jax.random.key(seed)[None]

  @jax.jit
  def read(variables: Variables, tokens_1L: jax.Array, length: Any) -> Any:
    outputs = model.apply(
      variables,
      tokens_1L,
      real=jnp.arange(size)[None] < length,
      cache=model.init_cache(1, size),
      head=False,
    )
    return outputs[1]["cache"]

  @functools.partial(jax.jit, donate_argnums=1)
  def write(
    variables: Variables, cache: Any, text_1N: Any, position: Any, number: Any
  ) -> Any:
    """Returns new token `number`, and the cache with the token before it."""
    end = len(ids) + number
    token = text_1N[0, end - 1]
    logits, cache = language_modeling.step_fn(
      variables, model, cache, token[None], position
    )
    logits = apply_rules(logits, text_1N, end - 1, jnp.reshape(number, 1))
    return decoding.choose(logits, keys_1, number, **options)[0], cache

  text = list(ids)
  text_1N = np.zeros((1, len(ids) + max_new), np.int32)  # For the rules.
  text_1N[0, : len(ids)] = ids
  cache = None
  position = 0  # Number of tokens in the cache.
  for number in range(max_new):
    if cache is None or position == size:
      # The cache is full: start again with the second half of the context.
      # `read` leaves out the last token, which is the input of `write`. New
      # tokens overwrite the padding in the cache.
      context = text[-size // 2 :] if len(text) >= size else text
      padded_1L = np.zeros((1, size), np.int32)
      padded_1L[0, : len(context) - 1] = context[:-1]
      position = len(context) - 1
      cache = read(variables, padded_1L, position)
    token, cache = write(variables, cache, text_1N, position, number)
    position += 1
    text_1N[0, len(text)] = int(token)
    text.append(int(token))
    yield text[-1]


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("generate", __doc__, changes_config=False)
  parser.add_argument(
    "--workdir",
    "--model",
    dest="path",
    required=True,
    help="a workdir, one of its checkpoints, or a published model's folder",
  )
  parser.add_argument("--prompt", default="", help="text to continue")
  parser.add_argument(
    "--image",
    action="append",
    default=[],
    help="picture of the prompt, a file; several with several flags",
  )
  parser.add_argument(
    "--chat",
    action="store_true",
    help="send the prompt as a user's message, in the model's chat template",
  )
  parser.add_argument(
    "--max_new",
    type=int,
    default=256,
    help="largest number of new tokens (default: %(default)s)",
  )
  parser.add_argument(
    "--num_beams",
    type=int,
    default=1,
    help="number of beams of a beam search, which prints its text at the end; "
    "1 writes token by token (default: %(default)s)",
  )
  parser.add_argument(
    "--length_penalty",
    type=float,
    default=0.0,
    help="larger values favour longer texts in a beam search "
    "(default: %(default)s)",
  )
  _add_sampling_arguments(parser)
  parser.add_argument(
    "--seed", type=int, default=0, help="random seed (default: %(default)s)"
  )
  parser.add_argument(
    "--step",
    type=int,
    help="step of the workdir's checkpoint (default: the newest)",
  )
  parser.add_argument(
    "--prefix",
    default="params",
    help="parameters to use: params or ema (default: %(default)s)",
  )
  parser.add_argument(
    "--tokenizer",
    help="'bytes' or a path (default: the tokenizer of the run's data)",
  )
  parser.add_argument(
    "--bos", action="store_true", help="start with the begin token"
  )
  return parser


def _add_sampling_arguments(parser: arguments.Parser) -> None:
  """Adds options without defaults: `_options` has those.

  The folder of a published model, or a run's config, takes precedence over the
  defaults.
  """
  parser.add_argument(
    "--temperature",
    type=float,
    help="temperature of the distribution; 0 always picks the most likely "
    "token (default: that of the model's folder, else 0)",
  )
  parser.add_argument(
    "--top_k",
    type=int,
    help="sample from the K most likely tokens; 0 for all (default: 0)",
  )
  parser.add_argument(
    "--top_p",
    type=float,
    help="sample from the most likely tokens whose probabilities sum to P "
    "(default: 1.0)",
  )
  parser.add_argument(
    "--min_p",
    type=float,
    help="sample from the tokens whose probability is at least P times that of "
    "the most likely one (default: 0.0)",
  )
  parser.add_argument(
    "--repetition_penalty",
    type=float,
    help="divide the logits of tokens that are already in the text by this "
    "(default: 1.0)",
  )
  parser.add_argument(
    "--no_repeat_ngram_size",
    type=int,
    help="never repeat a sequence of N tokens; 0 allows it (default: 0)",
  )
  parser.add_argument(
    "--min_new", type=int, help="least number of new tokens (default: 0)"
  )


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args, _ = _parser().parse(argv)
  # The prompt is printed with the first piece, because errors come before it.
  prefix = "" if args.chat else args.prompt
  for piece in generate(**vars(args)):
    sys.stdout.write(prefix + piece)
    sys.stdout.flush()
    prefix = ""
  print()
  return 0


if __name__ == "__main__":
  sys.exit(main())
