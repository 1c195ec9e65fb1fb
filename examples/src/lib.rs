//! Short programs to copy from.
