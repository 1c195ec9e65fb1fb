//! Which source a measurement is of.

#[cfg(test)]
#[path = "../../../build/repository.rs"]
mod repository;

/// The commit that the command was built from: what the build was told by `ROLLOUT_COMMIT`, or else that of the repository it
/// was built in, at that time. `None` where neither is known.
pub(in crate::cli) fn commit() -> Option<String> {
    option_env!("ROLLOUT_BUILT_FROM").map(String::from)
}
