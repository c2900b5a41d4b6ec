"""python lightning_digits.py"""

import os

import lightning
import torch
from lightning.pytorch import callbacks, loggers
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch_vit import ViT, data

FOLDER = "runs/newcomer_lightning"
train, test = data()


class Classifier(lightning.LightningModule):
  def __init__(self):
    super().__init__()
    self.vit = ViT()

  def training_step(self, batch, _):
    loss = functional.cross_entropy(self.vit(batch[0]), batch[1])
    self.log("loss", loss)
    return loss

  def validation_step(self, batch, _):
    right = self.vit(batch[0]).argmax(-1) == batch[1]
    self.log("accuracy", right.float().mean(), prog_bar=True)

  def configure_optimizers(self):
    optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
    steps = int(self.trainer.estimated_stepping_batches)
    warm = steps // 10
    schedule = torch.optim.lr_scheduler.SequentialLR(
      optimizer,
      [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warm),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm),
      ],
      [warm],
    )
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


lightning.seed_everything(0)
model = Classifier()
trainer = lightning.Trainer(
  max_epochs=30,
  default_root_dir=FOLDER,
  logger=loggers.CSVLogger(FOLDER),
  log_every_n_steps=5,
  enable_progress_bar=False,
  callbacks=[callbacks.ModelCheckpoint(FOLDER, save_last=True)],
)
last = f"{FOLDER}/last.ckpt"
trainer.fit(
  model,
  DataLoader(TensorDataset(*train), 128, shuffle=True),
  DataLoader(TensorDataset(*test), 360),
  ckpt_path=last if os.path.exists(last) else None,
)
print("accuracy", float(trainer.callback_metrics["accuracy"]))
model.eval()
with torch.no_grad():
  print(
    "label", int(test[1][0]), "predicted", int(model.vit(test[0][:1]).argmax())
  )
