"""The residual stream as a sum of what was written to it.

inputs.py    a batch, checked before the model runs it
writes.py    who writes to the stream of a model, and each write in a pass
checks.py    whether the writes add up to the stream
jvp.py       Jacobian-vector products of the stream between two of its depths
"""
