"""Makes trl_rewards.json: TRL's losses of answers with rewards, and gradients.

As in make_trl.py, TRL's own methods compute them from given log-probabilities.
In some cases no update came since the answers were drawn; in others the
log-probabilities at that time were `old`. The cases of `UPDATES` have several
updates after one rollout.

  python tests/golden/make_trl_rewards.py   # writes the file anew
"""

import json
import pathlib
import types

import numpy as np
import torch
from make_trl import LENGTH, _self
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

GROUPS, SAMPLES, MAX_NEW = 3, 4, 9
# Of our kinds: TRL's name, level of its ratios, its (epsilon, epsilon_high). In
# CISPO the latter is the largest ratio itself.
KINDS = {
  "grpo": ("grpo", "token", (0.2, 0.2)),
  "bnpo": ("bnpo", "token", (0.2, 0.2)),
  "dr_grpo": ("dr_grpo", "token", (0.2, 0.2)),
  "dapo": ("dapo", "token", (0.2, 0.28)),
  "rloo": ("rloo", "sequence", (0.2, 0.2)),
  "gspo": ("grpo", "sequence", (3e-4, 4e-4)),
  "cispo": ("cispo", "token", (0.0, 5.0)),
}
UPDATES, STEP_SIZE = 3, 2.0


class _Case:
  """TRL's loss of one kind, for the answers of a rollout."""

  def __init__(self, kind, beta, mask, reward, old, reference):
    self.trl_kind, level, (low, high) = KINDS[kind]
    self._own = _self(
      loss_type=self.trl_kind,
      beta=beta,
      max_completion_length=MAX_NEW,
      top_entropy_quantile=1.0,
      off_policy_mask_threshold=None,
      importance_sampling_level=level,
      epsilon_low=low,
      epsilon_high=high,
      use_vllm=False,
      _entropy_bonus_enabled=False,
      args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None),
    )
    self._own.accelerator.num_processes = 1
    self._own.accelerator.reduce = lambda x, reduction: x
    centred = reward - reward.mean(1, keepdim=True)
    scaled = centred / (reward.std(1, keepdim=True) + 1e-4)
    advantage = centred if kind == "dr_grpo" else scaled
    if kind == "rloo":
      divergence = (old - reference).sum(1).reshape(reward.shape)
      by_answer = reward - beta * divergence
      others = by_answer.sum(1, keepdim=True) - by_answer
      advantage = by_answer - others / (SAMPLES - 1)
    self._batch = dict(
      prompt_ids=torch.zeros((len(mask), 1), dtype=torch.long),
      prompt_mask=torch.ones((len(mask), 1), dtype=torch.long),
      completion_ids=torch.zeros(mask.shape, dtype=torch.long),
      completion_mask=mask.long(),
      num_items_in_batch=mask.sum(),
      ref_per_token_logps=reference,
      advantages=advantage.reshape(-1),
      old_per_token_logps=old,
      old_logps=old.sum(1),
    )

  def __call__(self, logps):
    """The loss of log-probabilities [X, L], and its gradient."""
    x = logps.clone().requires_grad_()
    self._own._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
      x,
      torch.zeros(x.shape),
      None,
    )
    trainer = RLOOTrainer if self.trl_kind == "rloo" else GRPOTrainer
    loss = trainer._compute_loss(self._own, None, self._batch)
    loss.backward()
    return loss.item(), x.grad


def write(golden):
  rng = np.random.default_rng(1)
  tokens = rng.integers(1, LENGTH + 1, GROUPS * SAMPLES)
  mask = torch.tensor(np.arange(LENGTH) < tokens[:, None])
  logps = torch.tensor(-rng.gamma(2.0, 0.7, mask.shape) * mask.numpy())
  reference = torch.tensor(-rng.gamma(2.0, 0.7, mask.shape) * mask.numpy())
  reward = torch.tensor(rng.normal(size=(GROUPS, SAMPLES)))
  reward[1] = 0.5  # All answers are as good.
  # Ratios from 0.3 to 3: on both sides of all bounds.
  drift = torch.tensor(rng.normal(0, 0.4, mask.shape) * mask.numpy())
  old = logps - drift

  as_list = lambda x: np.asarray(x).round(10).tolist()
  cases, updates = {}, {}
  for kind in KINDS:
    for beta in (0.0, 0.3):
      for is_old in (False, True):
        before = old if is_old else logps
        case = _Case(kind, beta, mask, reward, before, reference)
        loss, grad = case(logps)
        cases[f"{kind}, beta {beta}{', old' if is_old else ''}"] = dict(
          kind=kind,
          beta=beta,
          old=is_old,
          loss=round(loss, 10),
          grad=as_list(grad),
        )
    # Several updates of the log-probabilities themselves.
    case = _Case(kind, 0.0, mask, reward, logps, reference)
    now, losses = logps, []
    for _ in range(UPDATES):
      loss, grad = case(now)
      now = now - STEP_SIZE * grad
      losses.append(round(loss, 10))
    updates[kind] = dict(losses=losses, log_prob=as_list(now))
  result = dict(
    log_prob=as_list(logps),
    old=as_list(old),
    mask=mask.int().tolist(),
    reference=as_list(reference),
    reward=as_list(reward),
    max_new=MAX_NEW,
    cases=cases,
    step_size=STEP_SIZE,
    updates=updates,
  )
  path = pathlib.Path(golden) / "trl_rewards.json"
  path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
