//! Fewer cases of tests where each takes a hundred times as long.

/// When set, tests on a GPU take few of their cases ([`cases`]): under a sanitizer a kernel takes a hundred times as long.
pub const FEW_CASES_VARIABLE: &str = "ROLLOUT_FEW_CASES";

/// Whether tests shall take few of their cases: whether `ROLLOUT_FEW_CASES` is set.
pub fn few_cases() -> bool {
    std::env::var_os(FEW_CASES_VARIABLE).is_some()
}

/// All cases of a test, or of many the first, the middle and the last one, where [`few_cases`] are wanted.
///
/// ```
/// let batches = cuda_graphs::cases(1..=64);
/// assert!(batches == (1..=64).collect::<Vec<_>>() || batches == [1, 33, 64]);
/// ```
pub fn cases<T>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let all: Vec<T> = all.into_iter().collect();
    if !few_cases() || all.len() <= 3 {
        return all;
    }
    let chosen = [0, all.len() / 2, all.len() - 1];
    let kept = all.into_iter().enumerate().filter(|(i, _)| chosen.contains(i));
    kept.map(|(_, case)| case).collect()
}
