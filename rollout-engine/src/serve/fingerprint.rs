//! Whether the weights in a folder are still those that a policy was made of.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Names, sizes and times of the files that hold a model's weights and configuration: equal ones mean that none was written.
/// Other files of the folder, such as a trainer's markers and logs, count for nothing.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn of_folder(dir: &Path) -> io::Result<Vec<u8>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if !is_read(&path) {
            continue;
        }
        // Of what a link leads to.
        let meta = path.metadata()?;
        let time = meta.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        files.push(format!(
            "{:?} {} {}\n",
            path.file_name(),
            meta.len(),
            time.as_nanos()
        ));
    }
    files.sort();
    Ok(files.concat().into_bytes())
}

fn is_read(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_read_counts() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("writable");
        write("config.json", "{}");
        write("model.safetensors", "weights");
        let before = of_folder(dir.path()).expect("readable");
        write("READY", "");
        write("trainer_state.json", "{}");
        std::fs::create_dir(dir.path().join("checkpoint-1")).expect("writable");
        assert_eq!(of_folder(dir.path()).expect("readable"), before);
        for (name, text) in [
            ("model.safetensors", "longer weights"),
            ("config.json", "{ }"),
            ("model-2.safetensors", ""),
        ] {
            let before = of_folder(dir.path()).expect("readable");
            write(name, text);
            assert_ne!(of_folder(dir.path()).expect("readable"), before, "{name}");
        }
        assert!(of_folder(&dir.path().join("none")).is_err());
    }
}
