"""Makes trl_kto.npz: a step of TRL's KTOTrainer on rows with a label.

The whole trainer runs, from rows to gradients, in float64; only its head, which
computes in float32, is replaced. The reference is the model of hf_llama; the
model that learns has its matrices times SCALE.
requirements.txt has the versions.

  python tests/golden/make_trl_kto.py   # writes the file anew
"""

import pathlib
import tempfile

import datasets
import numpy as np
import tokenizers
import torch
import transformers
from trl import KTOConfig, KTOTrainer
from trl.trainer import kto_trainer
from trl.trainer.utils import FusedCausalLMOutput

SCALE = 0.7
WEIGHTS = dict(beta=0.3, desirable_weight=0.8, undesirable_weight=1.7)
# Numbers of tokens of the prompts and answers, and whether each is wanted.
ROWS = [
  *((3, 4, True), (5, 2, False), (2, 6, True)),
  *((4, 3, True), (1, 5, False), (3, 2, True)),
]


def _tokenizer(size):
  words = {"</s>" if i == 2 else f"w{i}": i for i in range(size)}
  model = tokenizers.models.WordLevel(words, unk_token="w0")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="</s>", pad_token="w0"
  )


def _rows(size):
  rng = np.random.default_rng(5)
  words = lambda n: " ".join(f"w{i}" for i in rng.integers(3, size, n))
  return [
    dict(prompt=words(p), completion=" " + words(c - 1), label=label)
    for p, c, label in ROWS
  ]


def _add_exact_head(model, **_):
  """Replaces TRL's add_fused_lm_head, with log-probabilities in float64."""
  forward = model.forward

  def exact(labels, fused_lm_head, **inputs):
    assert fused_lm_head
    by_class = forward(**inputs).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:, None]
    logps = by_class.gather(-1, targets.clamp(min=0))
    logps = logps.masked_fill(targets == -100, 0)[..., 0]
    zeros = torch.zeros_like(logps)
    return FusedCausalLMOutput(
      log_probs=logps, entropy=zeros, mean_logits=zeros
    )

  model.forward = exact


def write(golden):
  folder = pathlib.Path(__file__).parent / "hf_llama"
  kto_trainer.add_fused_lm_head = _add_exact_head
  load = transformers.AutoModelForCausalLM.from_pretrained
  reference = load(folder, dtype=torch.float64)
  model = load(folder, dtype=torch.float64)
  with torch.no_grad():
    for array in model.parameters():
      if array.ndim == 2:
        array *= SCALE
  size = model.config.vocab_size
  with tempfile.TemporaryDirectory() as workdir:
    args = KTOConfig(
      workdir,
      per_device_train_batch_size=len(ROWS),
      gradient_checkpointing=False,
      bf16=False,
      use_cpu=True,
      report_to=[],
      max_length=None,
      **WEIGHTS,
    )
    trainer = KTOTrainer(
      model,
      reference,
      args,
      train_dataset=datasets.Dataset.from_list(_rows(size)),
      processing_class=_tokenizer(size),
    )
    (batch,) = trainer.get_train_dataloader()
    model.train()
    loss = trainer.compute_loss(model, batch)
  loss.backward()
  result = {
    name: x.numpy() for name, x in batch.items() if "attention" not in name
  }
  result["loss"] = loss.item()
  result["kl"] = trainer._metrics["train"]["kl"][0]
  for name, array in model.named_parameters():
    result[f"grad/{name}"] = array.grad.numpy()
  np.savez_compressed(pathlib.Path(golden) / "trl_kto.npz", **result)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
