"""Records what the program chose for each "auto" in the config, and why.

run.json lists the choices of a run.
"""

# {key of the config: {case: {"choice": ..., "reason": ...}}}. A case is for
# instance the shape for which an implementation was chosen.
_choices: dict[str, dict[str, dict[str, str]]] = {}


def note_choice(key: str, case: str, value: str, reason: str) -> bool:
  """Records a choice; returns whether it is new and should be logged."""
  cases = _choices.setdefault(key, {})
  entry = {"choice": value, "reason": reason}
  is_new = cases.get(case) != entry
  cases[case] = entry
  return is_new


def choices() -> dict[str, dict[str, dict[str, str]]]:
  """Returns a copy of the choices since the last `forget_choices`."""
  # A list first, because other threads may add keys.
  return {key: dict(cases) for key, cases in list(_choices.items())}


def forget_choices() -> None:
  _choices.clear()
