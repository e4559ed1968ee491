"""Training with Megatron Core: data, a small DeepSeek-V3-shaped model, the loop, and the quick start made of them."""
