//! Block-sparse attention masks in the manner of FlexAttention, with paged KV caches, on CPU and CUDA.
