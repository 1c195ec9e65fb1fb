//! The page size of the tuned profile that GPU tests run under, if there is one: its kernel options reach every backend by
//! themselves.

/// Pages of the cache and their size: these, or at least as many tokens in pages of the profile's size.
pub fn pages(n_pages: usize, page_size: usize) -> (usize, usize) {
    match profile_page_size() {
        Some(size) => (1 + ((n_pages - 1) * page_size).div_ceil(size), size),
        None => (n_pages, page_size),
    }
}

fn profile_page_size() -> Option<usize> {
    let path = std::env::var(qwen3_model::KERNEL_OPTIONS_VARIABLE).ok()?;
    if path.is_empty() || path.starts_with('{') {
        return None;
    }
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let profile: serde_json::Value = serde_json::from_slice(&text).expect("a profile");
    let size = profile["options"]["page_size"].as_u64()?;
    Some(size as usize)
}
