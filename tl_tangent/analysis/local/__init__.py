"""Local geometry of activations: around token types, and of whole layers."""
