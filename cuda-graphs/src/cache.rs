//! Compiled kernels on disk.
//!
//! One file per compilation, named by the SHA-256 of everything that went in. Files are written under another name
//! and renamed, so that several processes may share the folder: a reader sees a whole file or none. A file that is
//! cut, altered or of another key is ignored and replaced.
//!
//! ```text
//! ┌──────────┬─────────┬────────────┬─────────────┬───────┐
//! │ magic  8 │ sha  32 │ length   4 │ header JSON │ cubin │   sha: of all that follows it
//! └──────────┴─────────┴────────────┴─────────────┴───────┘
//! ```

use std::io::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::cubin::ResourceUsage;

const MAGIC: &[u8; 8] = b"CUBINS 1";
const HEADER_AT: usize = 8 + 32 + 4;

/// Where compiled kernels are kept; overrides the usual place. `off` keeps none.
pub const CACHE_VARIABLE: &str = "ROLLOUT_KERNEL_CACHE";

/// Where compiled kernels are kept.
///
/// ```
/// use cuda_graphs::CacheLocation;
///
/// assert_eq!(CacheLocation::Folder("/tmp/kernels".into()).folder(), Some("/tmp/kernels".into()));
/// assert_eq!(CacheLocation::Off.folder(), None);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CacheLocation {
    /// `$ROLLOUT_KERNEL_CACHE`, or else `$XDG_CACHE_HOME/rollout/kernels`, or else `~/.cache/rollout/kernels`.
    #[default]
    Usual,
    /// This folder.
    Folder(PathBuf),
    /// Nowhere: every compilation is done anew.
    Off,
}

impl CacheLocation {
    /// The folder meant, if any.
    pub fn folder(&self) -> Option<PathBuf> {
        self.resolve(&|name| std::env::var_os(name))
    }

    fn resolve(&self, var: &dyn Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
        let var = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        match self {
            Self::Off => None,
            Self::Folder(folder) => Some(folder.clone()),
            Self::Usual => match var(CACHE_VARIABLE) {
                Some(value) if value == Path::new("off") => None,
                Some(folder) => Some(folder),
                None => var("XDG_CACHE_HOME")
                    // The convention: a relative path is to be ignored.
                    .filter(|path| path.is_absolute())
                    .or_else(|| var("HOME").map(|home| home.join(".cache")))
                    .map(|cache| cache.join("rollout/kernels")),
            },
        }
    }
}

/// What is kept of one compilation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) cubin: Vec<u8>,
    pub(crate) header: EntryHeader,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct EntryHeader {
    /// The key again, so that a renamed file is not taken for another.
    pub(crate) key: String,
    /// For people who look into the folder.
    pub(crate) kernel: String,
    pub(crate) arch: String,
    pub(crate) nvrtc: String,
    pub(crate) usage: Vec<ResourceUsage>,
    pub(crate) log: String,
}

/// A folder of entries. All failures to write are harmless: the kernel is there, it is only not kept.
#[derive(Debug, Clone)]
pub(crate) struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    pub(crate) fn new(location: &CacheLocation) -> Self {
        Self {
            folder: location.folder(),
        }
    }

    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The entry of `key`, if there is a whole one.
    pub(crate) fn load(&self, key: &str) -> Option<Entry> {
        let path = self.path(key)?;
        let bytes = std::fs::read(&path).ok()?;
        let entry = decode(&bytes, key);
        if entry.is_none() {
            tracing::warn!(path = %path.display(), "a kernel in the cache is damaged or foreign; compiling it again");
        }
        entry
    }

    /// Keeps `entry` under its key.
    pub(crate) fn store(&self, entry: &Entry) {
        let Some(path) = self.path(&entry.header.key) else {
            return;
        };
        if let Err(error) = write(&path, &encode(entry)) {
            tracing::warn!(path = %path.display(), %error, "a compiled kernel cannot be kept");
        }
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        self.folder
            .as_ref()
            .map(|folder| folder.join(format!("{key}.cubin")))
    }
}

/// Writes a file whole or not at all.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// The SHA-256 of `parts`, each with its length in front, as hexadecimal digits.
pub(crate) fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn encode(entry: &Entry) -> Vec<u8> {
    // A struct of strings and numbers has a JSON form.
    let header = serde_json::to_vec(&entry.header).unwrap_or_default();
    let mut body = Vec::with_capacity(4 + header.len() + entry.cubin.len());
    body.extend_from_slice(&(header.len() as u32).to_le_bytes());
    body.extend_from_slice(&header);
    body.extend_from_slice(&entry.cubin);
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&Sha256::digest(&body));
    bytes.extend_from_slice(&body);
    bytes
}

fn decode(bytes: &[u8], key: &str) -> Option<Entry> {
    let body = bytes.strip_prefix(MAGIC)?;
    let (checksum, body) = body.split_at_checked(32)?;
    if Sha256::digest(body).as_slice() != checksum {
        return None;
    }
    let len = u32::from_le_bytes(body.get(..4)?.try_into().ok()?) as usize;
    let header = bytes.get(HEADER_AT..HEADER_AT.checked_add(len)?)?;
    let header: EntryHeader = serde_json::from_slice(header).ok()?;
    (header.key == key).then(|| Entry {
        cubin: bytes[HEADER_AT + len..].to_vec(),
        header,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ffi::OsString;

    fn entry(key: &str) -> Entry {
        Entry {
            cubin: (0..=255).collect(),
            header: EntryHeader {
                key: key.to_string(),
                kernel: "k".to_string(),
                arch: "sm_90a".to_string(),
                nvrtc: "13.0".to_string(),
                usage: vec![ResourceUsage {
                    kernel: "k".to_string(),
                    registers: 32,
                    ..Default::default()
                }],
                log: "fine".to_string(),
            },
        }
    }

    fn cache() -> (tempfile::TempDir, DiskCache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(&CacheLocation::Folder(folder.path().join("deep/er")));
        (folder, cache)
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let (_folder, cache) = cache();
        assert_eq!(cache.load("a"), None);
        cache.store(&entry("a"));
        assert_eq!(cache.load("a"), Some(entry("a")));
        assert_eq!(cache.load("b"), None);
    }

    #[test]
    fn an_entry_under_another_name_is_foreign() {
        let (_folder, cache) = cache();
        cache.store(&entry("a"));
        let folder = cache.folder().unwrap();
        std::fs::copy(folder.join("a.cubin"), folder.join("b.cubin")).unwrap();
        assert_eq!(cache.load("b"), None);
    }

    #[test]
    fn a_damaged_entry_is_ignored_and_replaced() {
        let (_folder, cache) = cache();
        cache.store(&entry("a"));
        let path = cache.folder().unwrap().join("a.cubin");
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&whole[..0], &whole[..7], &whole[..50], &whole[..whole.len() - 1]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.load("a"), None, "{} bytes", damaged.len());
        }
        cache.store(&entry("a"));
        assert_eq!(cache.load("a"), Some(entry("a")));
    }

    #[test]
    fn a_folder_that_cannot_be_written_means_no_cache_and_no_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = DiskCache::new(&CacheLocation::Folder(file.path().join("below-a-file")));
        cache.store(&entry("a"));
        assert_eq!(cache.load("a"), None);
    }

    #[test]
    fn no_cache_keeps_nothing() {
        let cache = DiskCache::new(&CacheLocation::Off);
        cache.store(&entry("a"));
        assert_eq!(cache.load("a"), None);
    }

    #[test]
    fn many_writers_and_readers_at_once_never_see_a_part() {
        let (_folder, cache) = cache();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| cache.store(&entry("a"))));
                scope.spawn(|| {
                    for _ in 0..50 {
                        let path = cache.path("a").unwrap();
                        if path.exists() {
                            assert_eq!(cache.load("a"), Some(entry("a")));
                        }
                    }
                });
            }
        });
        let left: Vec<_> = std::fs::read_dir(cache.folder().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file is left");
    }

    #[test]
    fn the_place_follows_the_convention_and_can_be_set() {
        let resolve = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, OsString)> = vars
                .iter()
                .map(|(name, value)| (name.to_string(), OsString::from(value)))
                .collect();
            CacheLocation::Usual.resolve(&|name| {
                vars.iter()
                    .find(|(n, _)| n == name)
                    .map(|(_, value)| value.clone())
            })
        };
        assert_eq!(resolve(&[]), None);
        assert_eq!(
            resolve(&[("HOME", "/h")]),
            Some("/h/.cache/rollout/kernels".into())
        );
        assert_eq!(
            resolve(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]),
            Some("/x/rollout/kernels".into())
        );
        assert_eq!(
            resolve(&[("HOME", "/h"), ("XDG_CACHE_HOME", "relative")]),
            Some("/h/.cache/rollout/kernels".into())
        );
        assert_eq!(
            resolve(&[("HOME", "/h"), (CACHE_VARIABLE, "/mine")]),
            Some("/mine".into())
        );
        assert_eq!(resolve(&[("HOME", "/h"), (CACHE_VARIABLE, "off")]), None);
    }

    #[test]
    fn keys_depend_on_where_parts_end() {
        assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
        assert_eq!(key([]).len(), 64);
    }

    proptest! {
        #[test]
        fn one_changed_byte_anywhere_is_noticed(at in 0usize..10_000, change in 1u8..=255) {
            let mut bytes = encode(&entry("a"));
            let at = at % bytes.len();
            bytes[at] ^= change;
            prop_assert_eq!(decode(&bytes, "a"), None);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(decode(&bytes, "a"), None);
        }
    }
}
