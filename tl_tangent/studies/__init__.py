"""Many checkpoints of one model: a small training run, and what happens to it as it trains."""
