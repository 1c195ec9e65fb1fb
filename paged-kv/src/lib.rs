//! Page table and paged KV cache for language-model inference: reserve, erase, fork with copy on write.
