"""The residual stream as a sum of what was written to it.

writes.py    who writes to the stream of a model, and each write in a pass, checked to add up
jvp.py       Jacobian-vector products of the stream between two of its depths
"""
