//! Rollouts for reinforcement learning on language models: continuous batching over a paged KV cache, and the rollout command.
