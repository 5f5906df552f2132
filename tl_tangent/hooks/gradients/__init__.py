"""The weights of a model, their gradients, and what each of them reads and writes."""
