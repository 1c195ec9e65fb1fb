//! Which folder a model's name means.

use std::env::{home_dir, var_os};
use std::path::{Component, Path, PathBuf};

use crate::{Error, bundled};

/// The folder of a model: `model` itself; else what Hugging Face's cache on this machine holds under such an id, as
/// `Qwen/Qwen3-0.6B`; without a name the bundled one. Nothing is fetched.
///
/// # Errors
/// [`Error::NoModelFolder`] if there is neither; for the bundled model those of writing it to a cache.
pub(crate) fn find(model: Option<&Path>) -> Result<PathBuf, Error> {
    let Some(model) = model else {
        return bundled::model_dir();
    };
    if model.is_dir() {
        return Ok(model.to_owned());
    }
    let cached = hub_id(model).and_then(|id| in_hub(&hub_cache()?, &id));
    cached.ok_or_else(|| Error::NoModelFolder { path: model.into() })
}

/// `OWNER/NAME` if that is what a path looks like, and leads to no folder.
#[cfg_attr(not(feature = "serve"), allow(dead_code))]
pub(crate) fn hub_id(model: &Path) -> Option<String> {
    let mut parts = model.components().map(|part| match part {
        Component::Normal(part) => part.to_str(),
        _ => None,
    });
    match (parts.next()??, parts.next()??, parts.next()) {
        (owner, name, None) if !model.is_dir() => Some(format!("{owner}/{name}")),
        _ => None,
    }
}

/// Where `huggingface_hub` keeps what it has fetched.
fn hub_cache() -> Option<PathBuf> {
    let set = |variable| var_os(variable).filter(|value| !value.is_empty());
    let from = |variable, below: &str| set(variable).map(|dir| Path::new(&dir).join(below));
    from("HF_HUB_CACHE", "")
        .or_else(|| from("HF_HOME", "hub"))
        .or_else(|| from("XDG_CACHE_HOME", "huggingface/hub"))
        .or_else(|| Some(home_dir()?.join(".cache/huggingface/hub")))
}

/// The snapshot of the branch `main`.
fn in_hub(cache: &Path, id: &str) -> Option<PathBuf> {
    let model = cache.join(format!("models--{}", id.replace('/', "--")));
    let commit = std::fs::read_to_string(model.join("refs/main")).ok()?;
    let snapshot = model.join("snapshots").join(commit.trim());
    snapshot.is_dir().then_some(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_means_the_snapshot_of_main() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let model = cache.path().join("models--Qwen--Qwen3-0.6B");
        std::fs::create_dir_all(model.join("snapshots/abc")).expect("writable");
        assert_eq!(in_hub(cache.path(), "Qwen/Qwen3-0.6B"), None);
        std::fs::create_dir(model.join("refs")).expect("writable");
        std::fs::write(model.join("refs/main"), "abc\n").expect("writable");
        assert_eq!(
            in_hub(cache.path(), "Qwen/Qwen3-0.6B"),
            Some(model.join("snapshots/abc"))
        );
        assert_eq!(in_hub(cache.path(), "Qwen/other"), None);
    }

    #[test]
    fn only_an_owner_and_a_name_are_an_id() {
        assert_eq!(
            hub_id(Path::new("Qwen/Qwen3-0.6B")).as_deref(),
            Some("Qwen/Qwen3-0.6B")
        );
        for path in [
            "Qwen3-0.6B",
            "/Qwen/Qwen3-0.6B",
            "../Qwen3-0.6B",
            "a/b/c",
            "./a/b",
            "",
            "src/serve",
        ] {
            assert_eq!(hub_id(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn what_is_not_there_is_an_error_that_says_how_to_get_a_model() {
        for path in ["no-such-owner/no-such-model", "Cargo.toml"] {
            let error = find(Some(Path::new(path))).expect_err("no folder").to_string();
            assert!(
                error.starts_with(path) && error.contains("hf download"),
                "{error}"
            );
        }
    }
}
