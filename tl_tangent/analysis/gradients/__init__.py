"""Whether gradients lie in tangent subspaces, beyond matched controls and plain mechanics."""
