"""How a layer's attention scores come about from its input, on every class that has hook points.

circuit.py   what W_Q, W_K, norms, rotation, scale and cap of a layer are, as one value
norms.py     norms whose scale is frozen, which makes them linear
rotary.py    rotary position embeddings, as a linear map of queries or keys
observe.py   what a layer's attention reads and computes in a pass
split.py     a subspace and an observed layer -> the parts of queries and keys
choose.py    which subspace is meant at which layer, and in which space it lives
check.py     whether the parts add up to the model's own scores
pass_over.py a pass over one batch, with the tokens and cells that count
terms.py     dropping or scaling terms of the scores during a run
"""
