"""Makes generation.json: scores and texts by the rules of transformers.

Its logits processors change random scores, and its `generate` continues prompts
greedily with the model of hf_llama. requirements.txt has the version.

  python tests/golden/make_generation.py   # writes the file anew
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from transformers.generation import logits_process

B, LENGTH, V, EOS = 3, 9, 7, (2, 5)
PROMPT = 4
RULES = [
  dict(repetition_penalty=1.7),
  dict(repetition_penalty=0.6),
  dict(no_repeat_ngram_size=1),
  dict(no_repeat_ngram_size=2),
  dict(no_repeat_ngram_size=3),
  dict(min_new_tokens=6),
  dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=9),
  dict(suppress_tokens=[1, 48]),
  dict(begin_suppress_tokens=[3, 21]),
  # Of one token, of one that ends a text, and of several.
  dict(bad_words_ids=[[6], [2], [29], [1, 0], [4, 3, 1], [57, 35]]),
  dict(
    suppress_tokens=[48],
    begin_suppress_tokens=[21, 24],
    bad_words_ids=[[57], [50], [1, 41], [10, 20, 3]],
  ),
]


def _processors(rules):
  if "repetition_penalty" in rules:
    yield logits_process.RepetitionPenaltyLogitsProcessor(
      rules["repetition_penalty"]
    )
  if "no_repeat_ngram_size" in rules:
    yield logits_process.NoRepeatNGramLogitsProcessor(
      rules["no_repeat_ngram_size"]
    )
  if "min_new_tokens" in rules:
    yield logits_process.MinNewTokensLengthLogitsProcessor(
      PROMPT, rules["min_new_tokens"], list(EOS)
    )
  if "suppress_tokens" in rules:
    yield logits_process.SuppressTokensLogitsProcessor(rules["suppress_tokens"])
  if "begin_suppress_tokens" in rules:
    yield logits_process.SuppressTokensAtBeginLogitsProcessor(
      rules["begin_suppress_tokens"], LENGTH
    )
  if "bad_words_ids" in rules:
    words = [x for x in rules["bad_words_ids"] if max(x) < V]
    if words:
      yield logits_process.NoBadWordsLogitsProcessor(words, torch.tensor(EOS))


def write(golden):
  rng = np.random.default_rng(0)
  text = rng.integers(0, V, (B, LENGTH))
  scores = rng.normal(size=(B, V)).astype(np.float32) * 2
  folder = pathlib.Path(__file__).parent / "hf_llama"
  model = transformers.LlamaForCausalLM.from_pretrained(folder)
  prompts = rng.integers(3, 61, (2, 5))
  cases = []
  for rules in RULES:
    new = torch.tensor(scores)
    for processor in _processors(rules):
      new = processor(torch.tensor(text), new)
    tokens = model.generate(
      torch.tensor(prompts),
      attention_mask=torch.ones(prompts.shape, dtype=torch.long),
      max_new_tokens=20,
      do_sample=False,
      # The second is a token that the model likes.
      eos_token_id=[29, 48 if "min_new_tokens" in rules else 50],
      pad_token_id=0,
      **rules,
    )
    cases.append(
      dict(
        rules=rules,
        # JSON has no infinity.
        scores=[
          [None if np.isinf(x) else x for x in row] for row in new.tolist()
        ],
        tokens=tokens[:, prompts.shape[1] :].tolist(),
      )
    )
  result = dict(
    text=text.tolist(),
    scores=scores.tolist(),
    prompts=prompts.tolist(),
    cases=cases,
  )
  path = pathlib.Path(golden) / "generation.json"
  path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
