//! The `rollout` command.
fn main() {}
