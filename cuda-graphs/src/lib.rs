//! CUDA graphs per batch bucket, kernel compilation with a disk cache and address-stable buffers, without a toolkit at build time.
