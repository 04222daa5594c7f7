"""GRPO written out by hand: rollout, rewards, loss and the training loop."""
