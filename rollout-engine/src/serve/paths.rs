//! Folders that clients may have loaded.

use std::path::{Path, PathBuf};

use axum::http::StatusCode;

use super::error::ApiError;

/// The code of errors about files that are not there, at least not yet.
pub(super) const NOT_THERE: &str = "path_not_found";

/// The real folder behind `path`, if it lies below one of the allowed roots. Links are followed first. Relative paths
/// are taken from the first root.
///
/// The answer for a folder outside is the same whether it exists or not.
///
/// # Errors
/// 403 for a folder outside the roots, 400 for one inside that is not there.
pub(super) fn allowed(roots: &[PathBuf], field: &'static str, path: &str) -> Result<PathBuf, ApiError> {
    let refused = || {
        let mut error = ApiError::new(
            StatusCode::FORBIDDEN,
            format!("{field}: {path:?} is not below a folder that this server may load from"),
        );
        error.param = Some(field.into());
        error.code("path_not_allowed")
    };
    let Some(first) = roots.first() else {
        return Err(refused());
    };
    let path = first.join(Path::new(path));
    let real = match path.canonicalize() {
        Ok(real) => real,
        // What is not there can be told only of places inside.
        Err(_) if plainly_below(roots, &path) => {
            return Err(ApiError::bad_param(field, "there is no such folder").code(NOT_THERE));
        }
        Err(_) => return Err(refused()),
    };
    if !below(roots, &real) {
        return Err(refused());
    }
    // Its files, too: a link among them could lead anywhere.
    let files = std::fs::read_dir(&real).map_err(|_| ApiError::bad_param(field, "this is not a folder"))?;
    for file in files.flatten() {
        let linked = file.file_type().is_ok_and(|kind| kind.is_symlink());
        if linked && !file.path().canonicalize().is_ok_and(|file| below(roots, &file)) {
            return Err(refused());
        }
    }
    Ok(real)
}

/// Whether a path without links lies below one of the roots.
fn below(roots: &[PathBuf], real: &Path) -> bool {
    let mut roots = roots.iter().filter_map(|root| root.canonicalize().ok());
    roots.any(|root| real.starts_with(root))
}

/// Whether the deepest part of `path` that exists is below a root, with nothing after it that leads elsewhere.
fn plainly_below(roots: &[PathBuf], path: &Path) -> bool {
    let plain = path
        .components()
        .all(|part| !matches!(part, std::path::Component::ParentDir));
    let there = path.ancestors().find_map(|part| part.canonicalize().ok());
    plain && there.is_some_and(|there| below(roots, &there))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_below_a_root_are_found() {
        let top = tempfile::tempdir().expect("a temporary folder");
        let top = top.path();
        for dir in ["in/a", "in2/b", "out/secret"] {
            std::fs::create_dir_all(top.join(dir)).expect("writable");
        }
        std::fs::write(top.join("in/file"), "").expect("writable");
        let roots = [top.join("in"), top.join("in2")];
        let status = |path: &str| allowed(&roots, "lora_path", path).map_err(|e| e.status.as_u16());
        let real = top.canonicalize().expect("is there");
        assert_eq!(status("a"), Ok(real.join("in/a")));
        assert_eq!(
            status(top.join("in2/b").to_str().expect("UTF-8")),
            Ok(real.join("in2/b"))
        );
        assert_eq!(status("../in2/b"), Ok(real.join("in2/b")));
        for outside in [
            "../out/secret",
            "../out/none",
            "/etc",
            "/none",
            "../in3",
            "a/../../out/secret",
        ] {
            assert_eq!(status(outside), Err(403), "{outside}");
        }
        assert_eq!(status("none/deeper"), Err(400));
        assert_eq!(status("file"), Err(400));
        assert_eq!(
            allowed(&[], "lora_path", "a").map_err(|e| e.status.as_u16()),
            Err(403)
        );
        // A name that only begins like a root is outside.
        std::fs::create_dir(top.join("inner")).expect("writable");
        assert_eq!(status("../inner"), Err(403));
        #[cfg(unix)]
        {
            let link = |to: &str, name: &str| {
                std::os::unix::fs::symlink(top.join(to), top.join("in").join(name)).expect("links");
            };
            link("out/secret", "link");
            link("in/a", "good");
            link("out/none", "dangling");
            assert_eq!(status("link"), Err(403));
            assert_eq!(status("link/deeper"), Err(403));
            assert_eq!(status("good"), Ok(real.join("in/a")));
            // Whether its target is there is not told either.
            assert!(status("dangling").is_err());
            std::fs::write(top.join("out/file"), "").expect("writable");
            std::os::unix::fs::symlink(top.join("in/file"), top.join("in/a/inside")).expect("links");
            assert_eq!(status("a"), Ok(real.join("in/a")));
            std::os::unix::fs::symlink(top.join("out/file"), top.join("in/a/config.json")).expect("links");
            assert_eq!(status("a"), Err(403));
        }
    }
}
