"""Makes trl_rewards.json: TRL's losses of answers with rewards, and gradients.

As in make_trl.py, TRL's own methods compute them from given log-probabilities;
no update came since the answers were drawn.

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


def write(golden):
  groups, samples, max_new = 3, 4, 9
  rng = np.random.default_rng(1)
  tokens = rng.integers(1, LENGTH + 1, groups * samples)
  mask = torch.tensor(np.arange(LENGTH) < tokens[:, None])
  shape = mask.shape
  logps = -rng.gamma(2.0, 0.7, shape) * mask.numpy()
  reference = torch.tensor(-rng.gamma(2.0, 0.7, shape) * mask.numpy())
  reward = torch.tensor(rng.normal(size=(groups, samples)))
  reward[1] = 0.5  # All answers are as good.
  centred = reward - reward.mean(1, keepdim=True)
  scaled = centred / (reward.std(1, keepdim=True) + 1e-4)
  cases = {}
  for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "rloo"):
    for beta in (0.0, 0.3):
      own = _self(
        loss_type=kind,
        beta=beta,
        max_completion_length=max_new,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None),
      )
      own.accelerator.num_processes = 1
      own.accelerator.reduce = lambda x, reduction: x
      batch = dict(
        prompt_ids=torch.zeros((shape[0], 1), dtype=torch.long),
        prompt_mask=torch.ones((shape[0], 1), dtype=torch.long),
        completion_ids=torch.zeros(shape, dtype=torch.long),
        completion_mask=mask.long(),
        num_items_in_batch=mask.sum(),
        ref_per_token_logps=reference,
        advantages=(centred if kind == "dr_grpo" else scaled).reshape(-1),
      )
      trainer = GRPOTrainer
      if kind == "rloo":
        trainer, old = RLOOTrainer, torch.tensor(logps)
        by_answer = reward - beta * (old - reference).sum(1).reshape(
          groups, samples
        )
        others = by_answer.sum(1, keepdim=True) - by_answer
        advantage = by_answer - others / (samples - 1)
        batch |= dict(advantages=advantage.reshape(-1), old_logps=old.sum(1))

      x = torch.tensor(logps, requires_grad=True)
      own._get_per_token_logps_and_entropies = lambda *args, x=x, **kwargs: (
        x,
        torch.zeros(shape),
        None,
      )
      loss = trainer._compute_loss(own, None, batch)
      loss.backward()
      cases[f"{kind}, beta {beta}"] = dict(
        kind=kind,
        beta=beta,
        loss=round(loss.item(), 10),
        grad=x.grad.numpy().round(10).tolist(),
      )
  as_list = lambda x: np.asarray(x).round(10).tolist()
  result = dict(
    log_prob=as_list(logps),
    mask=mask.int().tolist(),
    reference=as_list(reference),
    reward=as_list(reward),
    max_new=max_new,
    cases=cases,
  )
  path = pathlib.Path(golden) / "trl_rewards.json"
  path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
