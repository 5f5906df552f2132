"""What attention scores are made of, and what their terms do to patterns and losses."""
