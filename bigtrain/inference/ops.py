"""Finds the preprocessing ops and the tokenizer for new pictures and texts.

A run has several lists of ops: one for its training data and one for each
evaluation. For pictures, this module uses the first of these that makes an
image without random numbers:

  1. the argument `pp`;
  2. `pp` of the evaluation that the argument `evaluation` names;
  3. `pp` of any evaluation in config.evals: first those whose `pred` is the
     predict function that will be called, then the others, each in the order of
     their names;
  4. `pp` of config.input.

For texts, it uses the argument `pp_text`, or `pp_text` of an evaluation, or the
ops that make tokens in the `pp` of an evaluation or of config.input.

Only the ops that the image or the tokens depend on are run, so new data need no
labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.inference import saved
from bigtrain.inputs import sources
from bigtrain.pp import parse, registry
from bigtrain.text import tokenizers

_CALLER = "bigtrain.load"


class Overrides(NamedTuple):
  """Arguments of `bigtrain.load` that replace the run's own values."""

  pp: str | None = None
  pp_text: str | None = None
  evaluation: str | None = None
  class_names: Sequence[str] | str | None = None
  tokenizer: str | None = None


class Chain(NamedTuple):
  """The ops that compute features from a single feature of the data."""

  # "image", with "shapes" if an op makes it; or the tokens of a text.
  features: tuple[str, ...]
  key: str  # Location in the config, or the name of an argument.
  needs: registry.Needed

  @property
  def spec(self) -> str:
    return "|".join(op.name for op in self.needs.ops)

  @property
  def raw(self) -> str:
    """Name of the feature that the first op reads."""
    return next(iter(self.needs.reads))


def find(
  config: Mapping[str, Any],
  feature: str,
  preds: Sequence[str],
  *,
  given: str | None = None,
  evaluation: str | None = None,
  option: str = "pp",
) -> Chain:
  """Returns the ops for a feature; for "image", also those for its "shapes".

  `option` is "pp" or "pp_text", and `given` is the user's value for it.
  """
  if given is not None:
    specs = [(option, given)]
  else:
    specs = list(_candidates(config, preds, evaluation, option))
  reasons = []  # Why each of them cannot be used.
  for key, spec in specs:
    ops = _parse(config, spec)
    if not _keeps(ops, feature):
      reasons.append(f"{key} drops it")
      continue
    features = [feature]
    if feature == "image" and any("shapes" in (op.origins or ()) for op in ops):
      features.append("shapes")
    needs = registry.needed(ops, features)
    # Ops of texts draw one of several captions, but there is only one here.
    random = [op.name for op in needs.ops if op.draws and feature == "image"]
    if random:
      reasons.append(f"{key} draws random numbers ({', '.join(random)})")
    elif len(needs.reads) != 1:
      reasons.append(f"{key} needs {', '.join(sorted(needs.reads))}")
    else:
      return Chain(tuple(features), key, needs)
  why = f": {'; '.join(reasons)}" if reasons else ""
  raise ConfigError(
    f"{_CALLER}: the run has no ops that make {feature!r} of new data"
    f"{why}. Give {option}=..., such as {_EXAMPLES[option]!r}."
  )


_EXAMPLES = {
  "pp": "decode|resize(224)|value_range(-1,1)",
  "pp_text": "tokenize(model='c4.model',max_len=64)",
}


def _parse(config: Mapping[str, Any], spec: str) -> list[registry.Op]:
  modules = config.get("pp_modules", ())
  return parse.parse(spec, modules, defer_errors=True) if spec else []


def _candidates(
  config: Mapping[str, Any],
  preds: Sequence[str],
  evaluation: str | None,
  option: str,
) -> Iterator[tuple[str, str]]:
  """Yields (location in the config, ops), best candidate first."""
  evals = config.get("evals") or {}
  if evaluation is not None:
    problem = "the run has no evaluation"
    check_choice(f"{_CALLER}: evaluation", evaluation, evals, problem)

  def rank(name: str) -> tuple[int, str]:
    pred = evals[name].get("pred")
    return preds.index(pred) if pred in preds else len(preds), name

  names = sorted(evals, key=rank) if evaluation is None else [evaluation]
  for name in names:
    entry = evals[name]
    if option in entry or (option == "pp" and "data" in entry):
      yield f"config.evals.{name}.{option}", entry.get(option, "")
  if evaluation is not None or option != "pp":
    return
  train_input = config.get("input", {})
  # Sizes that are drawn for each step: the last value, which is the largest.
  flexi = train_input.get("flexi") or {}
  drawn = {name: entry["values"][-1] for name, entry in flexi.items()}
  for name, entry in train_input.get("mixture", {}).items():
    spec = entry.get("pp", train_input.get("pp", ""))
    yield f"config.input.mixture.{name}.pp", sources.fill(spec, drawn)
  if "data" in train_input:
    spec = train_input.get("pp", "")
    yield "config.input.pp", sources.fill(spec, drawn)


def _keeps(ops: Sequence[registry.Op], feature: str) -> bool:
  """Whether a feature is still there after the last op."""
  for op in reversed(ops):
    name = registry.base_name(op)
    if (name == "keep" and feature not in op.reads) or (
      name == "drop" and feature in op.reads
    ):
      return False
    if op.origins and feature in op.origins:
      return True
  return True


def find_text(
  config: Mapping[str, Any],
  feature: str,
  preds: Sequence[str],
  given: str | None = None,
) -> Chain:
  """Returns the ops for the tokens of a text; `given` is `pp_text`."""
  has_pp_text = any(_candidates(config, preds, None, "pp_text"))
  option = "pp_text" if has_pp_text or given is not None else "pp"
  return find(config, feature, preds, given=given, option=option)


def tokenizer(
  checkpoint: saved.Saved, given: str | None
) -> tokenizers.Tokenizer | None:
  """Returns the tokenizer of a run, or None if the run has no tokens.

  `given` is "bytes", or the new path of a tokenizer that has moved.
  """
  known = checkpoint.data.get("tokenizer") or _tokenizer_of(checkpoint.config)
  name: Any = (known or {}).get("name")
  if given:
    name = tokenizers.moved(name, given) if name else given
  if name is None:
    return None
  try:
    result = tokenizers.get(name)
  except ConfigError as e:
    if given:
      raise
    raise ConfigError(f"{e} Give tokenizer=PATH if the file has moved.") from e
  if known:
    expected = known.get("fingerprint")
    expected = expected or checkpoint.fingerprints.get(known["name"])
    if expected and result.fingerprint() != expected:
      raise ConfigError(
        f"{_CALLER}: tokenizer={name!r}: not the one that the model was "
        f"trained with: its fingerprint is {result.fingerprint()}, expected "
        f"{expected}."
      )
  return result


def _tokenizer_of(config: Mapping[str, Any]) -> dict[str, str] | None:
  """The tokenizer that a config names; older checkpoints do not record it."""
  data = config.get("input", {}).get("data", {})
  if data.get("tokenizer"):
    return {"name": tokenizers.name_of(*tokenizers.parse(data["tokenizer"]))}
  if data.get("type") == "text":
    return {"name": "bytes"}
  for _, spec in _candidates(config, (), None, "pp"):
    if names := registry.tokenizer(_parse(config, spec)):
      return {"name": names[0]}
  return None


def with_tokenizer(
  config: Mapping[str, Any], data: Mapping[str, Any], path: str
) -> dict[str, Any]:
  """The config with the tokenizer's path replaced, also inside ops."""
  name = (data.get("tokenizer") or {}).get("name", "")
  old = tokenizers.parse(name)[0] if name else ""

  def replace(value: Any) -> Any:
    if isinstance(value, dict):
      if value.get("path") == old and tokenizers.has_new_tokens(value):
        return {**value, "path": path}
      return {name: replace(x) for name, x in value.items()}
    if isinstance(value, str) and old:
      for quote in "'\"":
        value = value.replace(f"{quote}{old}{quote}", repr(path))
    return value

  return {name: replace(x) for name, x in config.items()}


def pred_kw(
  config: Mapping[str, Any], pred: str, evaluation: str | None
) -> dict[str, Any]:
  """Options of a predict function, from the first evaluation that uses it."""
  for name, entry in sorted((config.get("evals") or {}).items()):
    if entry.get("pred") == pred and evaluation in (None, name):
      return dict(entry.get("pred_kw", {}))
  return {}


def evaluated_names(config: Mapping[str, Any]) -> Sequence[str] | str:
  """Class names of the run's first evaluation that has them."""
  for _, entry in sorted((config.get("evals") or {}).items()):
    if "class_names" in entry:
      return entry["class_names"]
  raise ConfigError(
    "class_names: missing, and no evaluation of the run has them."
  )
