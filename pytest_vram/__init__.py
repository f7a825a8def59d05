"""pytest-vram: budgets for the GPU memory of LLM deployments, checked by pytest."""
