"""python trainer_digits.py"""

import os

import numpy as np
import torch
import transformers
from torch.nn import functional
from torch_vit import ViT, data

FOLDER = "runs/newcomer_trainer"
train, test = data()


class Digits(torch.utils.data.Dataset):
  def __init__(self, images, labels):
    self.images, self.labels = images, labels

  def __len__(self):
    return len(self.images)

  def __getitem__(self, i):
    return {"image": self.images[i], "labels": self.labels[i]}


class Classifier(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.vit = ViT()

  def forward(self, image, labels=None):
    logits = self.vit(image)
    if labels is None:
      return {"logits": logits}
    return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def compute_metrics(predictions):
  right = predictions.predictions.argmax(-1) == predictions.label_ids
  return {"accuracy": float(np.mean(right))}


trainer = transformers.Trainer(
  model=Classifier(),
  args=transformers.TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=30,
    per_device_train_batch_size=128,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=0.1,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    seed=0,
    report_to=[],
  ),
  train_dataset=Digits(*train),
  eval_dataset=Digits(*test),
  compute_metrics=compute_metrics,
)
resume = os.path.isdir(FOLDER) and any(
  name.startswith("checkpoint-") for name in os.listdir(FOLDER)
)
trainer.train(resume_from_checkpoint=resume)
trainer.save_model(f"{FOLDER}/final")
print("accuracy", trainer.evaluate()["eval_accuracy"])
with torch.no_grad():
  logits = trainer.model(test[0][:1].to(trainer.args.device))["logits"]
print("label", int(test[1][0]), "predicted", int(logits.argmax(-1)))
