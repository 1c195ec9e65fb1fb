//! Tells the crate which commit it is built from, and cargo to ask again when that changes.

mod repository;

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-env-changed=ROLLOUT_COMMIT");
    let told = std::env::var("ROLLOUT_COMMIT").ok();
    // A package that cargo has fetched lies in no repository.
    let git = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.git");
    let found = told
        .filter(|commit| !commit.is_empty())
        .or_else(|| repository::commit(&git));
    for file in repository::files(&git) {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    if let Some(commit) = found {
        println!("cargo::rustc-env=ROLLOUT_BUILT_FROM={commit}");
    }
}
