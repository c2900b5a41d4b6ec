"""Makes trl.json: TRL's losses and gradients of given log-probabilities.

TRL's own methods compute the losses; a stub in place of the model returns the
log-probabilities of tokens, rewards, or logits. requirements.txt has the
library's version.

  python tests/golden/make_trl.py   # writes the file anew
"""

import collections
import json
import pathlib
import types

import numpy as np
import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

B, LENGTH = 4, 7
DPO = {
  "sigmoid": dict(beta=0.1),
  "sigmoid_norm": dict(beta=2.0),
  "ipo": dict(beta=0.3),
  "hinge": dict(beta=0.5),
  "robust": dict(beta=0.2, label_smoothing=0.1),
  "apo_zero": dict(beta=0.1),
  "apo_down": dict(beta=0.1),
  "bco_pair": dict(beta=0.1),
  "sppo_hard": dict(beta=0.4),
}


def _inputs():
  """Log-probabilities [2 B, L] of tokens, chosen answers first, and a mask."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, LENGTH + 1, 2 * B)
  mask = np.arange(LENGTH) < tokens[:, None]
  logps = -rng.gamma(2.0, 0.7, (2 * B, LENGTH)) * mask
  reference = -rng.gamma(2.0, 0.7, (2 * B, LENGTH)) * mask
  return mask, logps, reference


class _Outputs(types.SimpleNamespace):
  @classmethod
  def of(cls, log_probs):
    zeros = torch.zeros_like(log_probs).detach()
    return cls(
      log_probs=log_probs,
      entropy=zeros,
      mean_logits=zeros,
      is_top1=zeros.bool(),
      log_sum_sq_probs=zeros,
    )


def _self(**options):
  same = lambda x: x
  accelerator = types.SimpleNamespace(
    device="cpu", gather=same, gather_for_metrics=same
  )
  return types.SimpleNamespace(
    model=types.SimpleNamespace(training=False),
    accelerator=accelerator,
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    aux_loss_enabled=False,
    precompute_ref_logps=True,
    use_weighting=False,
    ld_alpha=None,
    label_smoothing=0.0,
    f_divergence_type="reverse_kl",
    _total_train_tokens=0,
    _tp_size=1,
    **options,
  )


def _with_gradient(fn, logps):
  """(loss, gradients [B, 2] of the sums of log-probabilities)."""
  logps = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
  loss = fn(logps)
  loss.backward()
  grad = logps.grad
  # All tokens of an answer have the same gradient.
  grad = grad[:, 0] if grad.ndim == 2 else grad
  return {
    "loss": round(loss.item(), 10),
    "grad": grad.reshape(2, -1).T.numpy().round(10).tolist(),
  }


def write(golden):
  mask, logps, reference = _inputs()
  first = np.zeros((2 * B, 1), bool)
  completion = torch.tensor(np.concatenate([first, mask], axis=1))
  ids = torch.zeros(completion.shape, dtype=torch.long)
  ref = torch.tensor(reference.sum(1))
  batch = dict(
    input_ids=ids,
    attention_mask=torch.ones_like(ids),
    completion_mask=completion.long(),
    ref_chosen_logps=ref[:B],
    ref_rejected_logps=ref[B:],
  )
  pairs = lambda x: np.asarray(x).reshape(2, B).T.round(10).tolist()
  result = dict(
    sums=pairs(logps.sum(1)),
    tokens=pairs(mask.sum(1)),
    reference=pairs(reference.sum(1)),
    cases={},
  )
  for kind, options in DPO.items():
    own = _self(loss_types=[kind], loss_weights=[1.0])
    vars(own).update(options)

    def dpo(x, own=own):
      model = lambda **kwargs: _Outputs.of(x)
      return DPOTrainer._compute_loss(own, model, dict(batch), False)

    result["cases"][kind] = dict(options=options, **_with_gradient(dpo, logps))
  result["cases"]["kto"] = _kto(batch, mask, logps, ref)
  result["cases"] |= _without_reference(mask, logps)
  result["reward"], result["jsd"] = _rewards(), _divergences()
  path = pathlib.Path(golden) / "trl.json"
  path.write_text(json.dumps(result, indent=1) + "\n")


def _kto(batch, mask, logps, ref):
  options = dict(beta=0.2, desirable=1.5, undesirable=0.7)
  drift = torch.linspace(-0.5, 1.3, 2 * B, dtype=torch.float64)
  given = dict(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    completion_mask=batch["completion_mask"],
    label=torch.arange(2 * B) < B,
    ref_logps=ref,
    ref_KL_logps=torch.zeros(2 * B, dtype=torch.float64),
  )
  own = _self(
    beta=options["beta"],
    loss_type="kto",
    calculate_KL=True,
    desirable_weight=options["desirable"],
    undesirable_weight=options["undesirable"],
  )
  own._compute_kl_logps = lambda model, batch: drift

  def kto(x):
    model = lambda **kwargs: _Outputs.of(x)
    return KTOTrainer._compute_loss(own, model, dict(given), False)

  case = _with_gradient(kto, logps)
  return dict(options=options, drift=drift.mean().item(), **case)


def _without_reference(mask, logps):
  cases = {}
  tokens = torch.tensor(mask.sum(1))

  def means(sums):
    return (sums / tokens).chunk(2)

  options = dict(beta=2.0, gamma=1.0, label_smoothing=0.1)
  own = types.SimpleNamespace(
    accelerator=types.SimpleNamespace(device="cpu"),
    alpha=0.0,
    beta=2.0,
    simpo_gamma=1.0,
    label_smoothing=0.1,
    loss_type="simpo",
  )
  simpo = lambda x: CPOTrainer.cpo_loss(own, *means(x))[0].mean()
  sums = logps.sum(1)
  cases["simpo"] = dict(options=options, **_with_gradient(simpo, sums))

  options = dict(beta=0.2, sft=0.0)
  other = types.SimpleNamespace(**vars(own) | dict(loss_type="sigmoid"))
  other.beta, other.label_smoothing = 0.2, 0.0
  cpo = lambda x: CPOTrainer.cpo_loss(other, *x.chunk(2))[0].mean()
  cases["cpo"] = dict(options=options, **_with_gradient(cpo, sums))

  options = dict(beta=0.3)
  odds = types.SimpleNamespace(accelerator=own.accelerator, beta=0.3)

  def orpo(x):
    chosen, rejected = means(x)
    losses = ORPOTrainer.odds_ratio_loss(odds, chosen, rejected)[0]
    return -chosen.mean() - losses.mean()

  cases["orpo"] = dict(options=options, **_with_gradient(orpo, sums))
  return cases


def _rewards():
  """Rewards [B, 2] with margins [B], and the loss of a reward model."""
  rng = np.random.default_rng(1)
  rewards = rng.normal(size=(2, B)).round(6)
  margin = rng.uniform(size=B).round(6)
  own = _self(args=types.SimpleNamespace(center_rewards_coefficient=0.02))

  def loss(x):
    logits = x.reshape(-1, 1)
    model = lambda **kwargs: types.SimpleNamespace(logits=logits)
    mask = torch.ones(2 * B, 1)
    given = dict(attention_mask=mask, margin=torch.tensor(margin))
    return RewardTrainer.compute_loss(own, model, given)

  case = _with_gradient(loss, rewards.reshape(-1))
  return dict(rewards=rewards.T.tolist(), margin=margin.tolist(), **case)


def _divergences():
  """Logits [B, L, V] of both models, a mask, and losses of the student."""
  rng = np.random.default_rng(2)
  student, teacher = rng.normal(size=(2, B, 3, 5)).round(6) * 2
  mask = rng.uniform(size=(B, 3)) < 0.7
  labels = torch.where(torch.tensor(mask), 1, -100)
  cases = []
  for beta, temperature in ((0.0, 1.0), (1.0, 1.0), (0.3, 2.0)):
    x = torch.tensor(student, requires_grad=True)
    loss = GKDTrainer.generalized_jsd_loss(
      x, torch.tensor(teacher), labels, beta, temperature
    )
    loss.backward()
    options = dict(beta=beta, temperature=temperature)
    grad = x.grad.numpy().round(10).tolist()
    cases.append(dict(options=options, loss=round(loss.item(), 10), grad=grad))
  return dict(
    student=student.tolist(),
    teacher=teacher.tolist(),
    mask=mask.tolist(),
    cases=cases,
  )


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
