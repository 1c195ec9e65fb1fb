//! Qwen3 language models: configuration, weight loading and the layer stack on CPU and CUDA over a paged KV cache.
