//! Exact merging of PEFT LoRA adapters from a pristine copy of the weights, with digests that prove nothing drifts.
