"""Finds the ops and the tokenizer that new pictures and texts need.

The ops for pictures are the first of these that make an image without random
numbers: the argument `pp`; `pp` of the evaluation that the argument
`evaluation` names; `pp` of any evaluation in config.evals, by name, those first
whose `pred` is the predict function in question; `pp` of config.input.

The ops for texts are the argument `pp_text`, `pp_text` of an evaluation, or the
ops that make the tokens in the `pp` of an evaluation or of config.input. In all
cases only the ops run that the feature depends on, so labels are not needed.
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
  """The ops that make one feature."""

  feature: str
  key: str  # Location in the config, or the name of an argument.
  needs: registry.Needed  # With the feature of the source that they begin with.

  @property
  def spec(self) -> str:
    return "|".join(op.name for op in self.needs.ops)

  @property
  def raw(self) -> str:
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
  """Returns the ops for a feature; `given` is the value of the option."""
  reasons = []
  specs = [(option, given)] if given is not None else []
  specs = specs or list(_candidates(config, preds, evaluation, option))
  for key, spec in specs:
    ops = _parse(config, spec)
    if not _keeps(ops, feature):
      reasons.append(f"{key} drops it")
      continue
    needs = registry.needed(ops, {feature})
    # Of a single text, any random number chooses the same.
    random = [op.name for op in needs.ops if op.draws and feature == "image"]
    if random:
      reasons.append(f"{key} draws random numbers ({', '.join(random)})")
    elif len(needs.reads) != 1:
      reasons.append(f"{key} needs {', '.join(sorted(needs.reads))}")
    else:
      return Chain(feature, key, needs)
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
  """Yields (location, ops) of a config, the best first."""
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
  cfg = config.get("input", {})
  drawn = {k: x["values"][-1] for k, x in (cfg.get("flexi") or {}).items()}
  for name, entry in cfg.get("mixture", {}).items():
    spec = sources.fill(entry.get("pp", cfg.get("pp", "")), drawn)
    yield f"config.input.mixture.{name}.pp", spec
  if "data" in cfg:
    yield "config.input.pp", sources.fill(cfg.get("pp", ""), drawn)


def _keeps(ops: Sequence[registry.Op], feature: str) -> bool:
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
  own = given is not None or any(_candidates(config, preds, None, "pp_text"))
  option = "pp_text" if own else "pp"
  return find(config, feature, preds, given=given, option=option)


def tokenizer(
  checkpoint: saved.Saved, given: str | None
) -> tokenizers.Tokenizer | None:
  """Returns the tokenizer of a run, or None for a run without tokens.

  `given` is "bytes" or the path to which the run's tokenizer has moved.
  """
  known = checkpoint.data.get("tokenizer") or _tokenizer_of(checkpoint.config)
  name = given or (known or {}).get("name")
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
  """The tokenizer that a config names, for older checkpoints."""
  data = config.get("input", {}).get("data", {})
  if data.get("tokenizer"):
    return {"name": data["tokenizer"]}
  if data.get("type") == "text":
    return {"name": "bytes"}
  for _, spec in _candidates(config, (), None, "pp"):
    if names := registry.tokenizer(_parse(config, spec)):
      return {"name": names[0]}
  return None


def with_tokenizer(
  config: Mapping[str, Any], data: Mapping[str, Any], path: str
) -> dict[str, Any]:
  old = (data.get("tokenizer") or {}).get("name", "")

  def replace(value: Any) -> Any:
    if isinstance(value, dict):
      return {name: replace(x) for name, x in value.items()}
    if isinstance(value, str) and old:
      for quote in "'\"":
        value = value.replace(f"{quote}{old}{quote}", repr(path))
    return value

  return {name: replace(x) for name, x in config.items()}


def pred_kw(
  config: Mapping[str, Any], pred: str, evaluation: str | None
) -> dict[str, Any]:
  """Options of a predict function, from the run's first evaluation with it."""
  for name, entry in sorted((config.get("evals") or {}).items()):
    if entry.get("pred") == pred and evaluation in (None, name):
      return dict(entry.get("pred_kw", {}))
  return {}


def evaluated_names(config: Mapping[str, Any]) -> Sequence[str] | str:
  for _, entry in sorted((config.get("evals") or {}).items()):
    if "class_names" in entry:
      return entry["class_names"]
  raise ConfigError(
    "class_names: missing, and no evaluation of the run has them."
  )
