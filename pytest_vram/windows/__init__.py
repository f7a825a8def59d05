"""Token windows over a KV cache: what leaves when the limit is reached, and what must never leave."""
