//! The small trained model that ships inside the crate.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::Error;

macro_rules! model_file {
    ($name:literal) => {
        (
            $name,
            include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/models/tiny-qwen3-math/",
                $name
            ))
            .as_slice(),
        )
    };
}

/// All files of the model.
const FILES: [(&str, &[u8]); 6] = [
    model_file!("config.json"),
    model_file!("generation_config.json"),
    model_file!("tokenizer.json"),
    model_file!("tokenizer_config.json"),
    model_file!("chat_template.jinja"),
    model_file!("model.safetensors"),
];

/// Problems of the kind that the bundled model was trained on, as user messages.
pub const PROMPTS: [&str; 4] = [
    "Noah has 255 apples. Noah sells 89 apples. 75 apples break. What is the number of apples now?",
    "Wendy buys 8 boxes with 59 tickets in each box. Wendy buys 42 tickets. Wendy finds 87 more tickets. How many \
     tickets are left with Wendy?",
    "Uma has 31 tickets. Uma sells 25 tickets. Uma finds 74 more tickets. How many tickets are left with Uma?",
    "Count from 259 to 315 by 2.",
];

/// The system message that the bundled model was trained with.
pub const SYSTEM_PROMPT: &str = "Solve the problem step by step. End with #### and the answer.";

/// A folder with the bundled model: the source folder where it is there, else a copy in the user's cache folder,
/// written on first use.
///
/// # Errors
/// The copy cannot be written.
pub fn model_dir() -> Result<PathBuf, Error> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-qwen3-math");
    if complete(&source) {
        return Ok(source);
    }
    unpack(&cache_dir()?)
}

/// Writes the files below `cache`, in a folder named by their digest, and gives that folder. A folder that is
/// complete is left alone; an incomplete one is never seen under that name.
fn unpack(cache: &Path) -> Result<PathBuf, Error> {
    let mut digest = Sha256::new();
    for (name, bytes) in FILES {
        digest.update(name.as_bytes());
        digest.update(bytes);
    }
    let name: String = digest
        .finalize()
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let dir = cache.join(format!("tiny-qwen3-math-{name}"));
    if complete(&dir) {
        return Ok(dir);
    }
    std::fs::create_dir_all(cache).map_err(|e| Error::io(cache, e))?;
    // A name of its own for every call: neither another process nor another thread writes there.
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let unfinished = cache.join(format!(".tiny-qwen3-math-{name}.{}.{call}", std::process::id()));
    let result = write_files(&unfinished).and_then(|()| {
        // Another process may have been faster; a damaged folder of that name gives way.
        if std::fs::rename(&unfinished, &dir).is_ok() {
            return Ok(());
        }
        if !complete(&dir) {
            let _ = std::fs::remove_dir_all(&dir);
            if let Err(error) = std::fs::rename(&unfinished, &dir) {
                // Unless another call has just repaired it.
                if !complete(&dir) {
                    return Err(Error::io(&dir, error));
                }
            }
        }
        Ok(())
    });
    // Gone if it was renamed.
    let _ = std::fs::remove_dir_all(&unfinished);
    result.map(|()| dir)
}

fn write_files(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
    for (name, bytes) in FILES {
        let path = dir.join(name);
        let write = || {
            let mut file = std::fs::File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(|e| Error::io(&path, e))?;
    }
    Ok(())
}

/// Whether every file is there, in its full length.
fn complete(dir: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| {
        std::fs::metadata(dir.join(name)).is_ok_and(|meta| meta.is_file() && meta.len() == bytes.len() as u64)
    })
}

/// `$XDG_CACHE_HOME/rollout-engine`, or its default below the home folder.
fn cache_dir() -> Result<PathBuf, Error> {
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let base = absolute("XDG_CACHE_HOME").or_else(|| {
        let home = absolute("HOME").or_else(|| absolute("USERPROFILE"))?;
        Some(home.join(".cache"))
    });
    let base = base.ok_or_else(|| Error::InvalidSetting {
        setting: "model",
        value: "(bundled)".into(),
        advice: "neither HOME nor XDG_CACHE_HOME says where to unpack it: set one, or name a model folder"
            .into(),
    })?;
    Ok(base.join("rollout-engine"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_is_repeatable_and_repairs_a_damaged_copy() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let dir = unpack(cache.path()).expect("unpacks");
        for (name, bytes) in FILES {
            assert_eq!(std::fs::read(dir.join(name)).expect("was written"), bytes);
        }
        std::fs::write(dir.join("config.json"), "cut of").expect("writable");
        assert_eq!(unpack(cache.path()).expect("repairs"), dir);
        assert_eq!(
            std::fs::read(dir.join("config.json")).expect("was written"),
            FILES[0].1
        );
        assert_eq!(
            std::fs::read_dir(cache.path()).expect("readable").count(),
            1,
            "nothing is left beside it"
        );
    }

    #[test]
    fn unpacking_at_the_same_time_works() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| unpack(cache.path()).expect("unpacks"));
            }
        });
    }
}
