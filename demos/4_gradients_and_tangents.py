# %% [markdown]
# # Gradients and tangents during a training
#
# `pip install .` in a clone of tl_tangent. No model is needed: a small one is trained here.
#
# Are weight gradients in the tangent subspace of the activations more than chance, and more than
# mechanics give? The recorder stands inside of any PyTorch loop.

# %%
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tl_tangent as tt

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(config)

# %% [markdown]
# The text is a random bigram language with Zipf's law, so that there is something to learn and what
# can be learned is known.

# %%
generator = torch.Generator().manual_seed(1)
frequency = 1 / torch.arange(1, 257, dtype=torch.float64)
successors = torch.stack([frequency[torch.randperm(256, generator=generator)] for _ in range(256)])
successors = successors**1.5
successors /= successors.sum(1, keepdim=True)


def batch(step: int, rows: int = 16, length: int = 32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (rows, 1), generator=draw)
    for _ in range(length - 1):
        following = torch.multinomial(successors[tokens[:, -1]], 1, generator=draw)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


entropy = -(successors * successors.log()).sum(1).mean()
print(f"entropy of the language about {entropy:.2f} nats a token, {math.log(256):.2f} at the start")

# %% [markdown]
# ## Train and record
#
# Q_T follows the activations until step 60 and stays then. `nulls=True` also measures what the same
# activations and upstream gradients give when they are paired at random.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
recorder = tt.GradientRecorder(
    model, proxy="early", freeze_at=60, refit_every=20, activations_every=2, rank=4, nulls=True
)
losses = []
with recorder:
    for step in range(200):
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        recorder.record(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
run = recorder.run()
print(f"{losses[0]:.2f} to {sum(losses[-10:]) / 10:.2f} nats a token; {run}")
assert sum(losses[-10:]) / 10 < losses[0] - 1

# %%
run.plot()

# %% [markdown]
# ## What of it is mechanical
#
# `excess_pairing` is the ratio over what random pairing gives: near 1 there is nothing that the
# activations alone would not do.

# %%
late = run.to_dataframe("kind").query("step > 60").groupby("kind", sort=False)
table = late[["energy_ratio_exact", "pairing_ratio", "excess_pairing"]].median()
assert (table["energy_ratio_exact"] > 0).all()
table.round(2)

# %% [markdown]
# The test over checkpoints, with phases, intervals and IsoScore*, is `tt.alignment_test`; `make study`
# runs it on a model that learns from real text.
