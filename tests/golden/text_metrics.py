"""Makes text_metrics.json: published definitions of metrics of texts.

  python tests/golden/text_metrics.py evaluate-v2.0.py

The argument is SQuAD's official script, of
rajpurkar.github.io/SQuAD-explorer; the other values are scikit-learn's and
SciPy's. tests/evaluation/test_text_metrics.py computes the same.
"""

import importlib.util
import json
import pathlib
import random
import sys

PATH = pathlib.Path(__file__).with_suffix(".json")
WORDS = ["the", "a", "An", "cat's", "cat", "dog", "it's", "(two)", "U.S.", "-"]


def answers():
  """Texts with one to three references, some of them empty."""
  draw = random.Random(0)
  text = lambda: " ".join(draw.choices(WORDS, k=draw.randrange(5)))
  rows = [(text(), [text() for _ in range(1 + i % 3)]) for i in range(40)]
  rows += [("The Cat", ["cat"]), ("", [""]), ("the", ["", "a"])]
  return rows + [("übers  Meer", ["Übers Meer."])]


def labels(number):
  draw = random.Random(number)
  names = [f"class {i}" for i in range(number)]
  right = draw.choices(names, k=50)
  return [(x if draw.random() < 0.6 else draw.choice(names), x) for x in right]


def numbers():
  draw = random.Random(1)
  right = [round(draw.uniform(0, 5), 1) for _ in range(40)]
  return [(str(round(x + draw.gauss(0, 1))), str(x)) for x in right]


def main(script):
  import scipy.stats
  import sklearn.metrics

  spec = importlib.util.spec_from_file_location("squad", script)
  squad = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(squad)
  rows = answers()
  questions = [
    {"id": i, "answers": [{"text": text} for text in texts]}
    for i, (_, texts) in enumerate(rows)
  ]
  data = [{"paragraphs": [{"qas": questions}]}]
  exact, f1 = squad.get_raw_scores(data, {i: r[0] for i, r in enumerate(rows)})
  result = {
    "squad_exact": 100 * sum(exact.values()) / len(rows),
    "squad_f1": 100 * sum(f1.values()) / len(rows),
  }
  for number in (2, 3):
    given, right = zip(*labels(number))
    value = sklearn.metrics.matthews_corrcoef(right, given)
    result[f"matthews_{number}"] = float(value)
    result[f"accuracy_{number}"] = sklearn.metrics.accuracy_score(right, given)
  rows = [[float(text) for text in row] for row in zip(*numbers())]
  for name in ("pearson", "spearman"):
    value = getattr(scipy.stats, f"{name}r")(*rows).statistic
    result[name] = float(value)
  PATH.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  main(sys.argv[1])
