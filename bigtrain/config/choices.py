"""What the program chose wherever a config says "auto", and why.

The choices of a run are in its run.json.
"""

_choices: dict[str, dict[str, dict[str, str]]] = {}


def note_choice(key: str, case: str, value: str, reason: str) -> bool:
  """Notes what the program chose for an "auto" in the config; True if new."""
  cases = _choices.setdefault(key, {})
  entry = {"choice": value, "reason": reason}
  news = cases.get(case) != entry
  cases[case] = entry
  return news


def choices() -> dict[str, dict[str, dict[str, str]]]:
  """Returns {key: {case: {"choice": ..., "reason": ...}}} since the start."""
  return {key: dict(cases) for key, cases in list(_choices.items())}


def forget_choices() -> None:
  _choices.clear()
