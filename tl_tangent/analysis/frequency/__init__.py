"""Token types of a model: how frequent they are, and how far their occurrences spread."""
