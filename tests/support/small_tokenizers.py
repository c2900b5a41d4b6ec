"""Real tokenizers, small ones, made by the trainers of their libraries."""

import io

TEXTS = [
  f"a {left} left of a {right}"
  for left in ("zero", "one", "two", "three", "four", "five")
  for right in ("six", "seven", "eight", "nine", "ten")
]


def sentencepiece_model(path, **options):
  """Writes a SentencePiece model with <pad> 0, </s> 1, <unk> 2 to `path`."""
  import sentencepiece

  model = io.BytesIO()
  defaults = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS),
    model_writer=model,
    vocab_size=400,
    hard_vocab_limit=False,
    minloglevel=2,
    **{**defaults, **options},
  )
  path.write_bytes(model.getvalue())
  return str(path)


def tokenizer_json(path, special=("<|endoftext|>",)):
  """Writes a byte-level BPE as tokenizers saves it to `path`."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=list(special),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(TEXTS, trainer)
  # What somebody trained with must not matter here.
  made.enable_truncation(4)
  made.enable_padding(length=8, pad_token=special[0])
  made.save(str(path))
  return str(path)
