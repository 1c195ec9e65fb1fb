//! Which algorithm was fastest for which product, on disk: one JSON file per device and library version.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::blas::Algorithm;
use crate::cache::{CacheLocation, key, write};
use crate::device::DeviceInfo;

/// The fastest algorithm of one product.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    pub(crate) algorithm: Algorithm,
    pub(crate) microseconds: f64,
    pub(crate) tried: usize,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct File {
    device: String,
    library: usize,
    choices: BTreeMap<String, StoredChoice>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredChoice {
    algorithm: [u64; 8],
    microseconds: f64,
    tried: usize,
    /// Of product and algorithm: an edited file must not reach the library.
    checksum: String,
}

/// The file of one device and library version.
#[derive(Debug)]
pub(crate) struct ChoiceFile {
    path: Option<PathBuf>,
    device: String,
    library: usize,
}

impl ChoiceFile {
    pub(crate) fn new(location: &CacheLocation, device: &DeviceInfo, library: usize) -> Self {
        let (major, minor) = device.compute_capability;
        let device = format!(
            "{} {major}.{minor}, {} SMs, driver {}",
            device.name, device.multiprocessors, device.driver_version
        );
        let name = key([device.as_bytes(), &library.to_le_bytes()]);
        let path = location
            .folder()
            .map(|folder| folder.join(format!("matmul-{}.json", &name[..16])));
        Self {
            path,
            device,
            library,
        }
    }

    /// All choices that are whole.
    pub(crate) fn load(&self) -> BTreeMap<String, Choice> {
        let file = self.read();
        let valid = |(product, stored): (String, StoredChoice)| {
            let choice = Choice {
                algorithm: Algorithm(stored.algorithm),
                microseconds: stored.microseconds,
                tried: stored.tried,
            };
            (checksum(&product, &choice.algorithm) == stored.checksum).then_some((product, choice))
        };
        file.choices.into_iter().filter_map(valid).collect()
    }

    /// Adds one choice to those that are there. Of two processes that write at once one choice may be lost, to be made
    /// again some day.
    pub(crate) fn add(&self, product: &str, choice: &Choice) {
        let Some(path) = &self.path else { return };
        let mut file = self.read();
        let stored = StoredChoice {
            algorithm: choice.algorithm.0,
            microseconds: choice.microseconds,
            tried: choice.tried,
            checksum: checksum(product, &choice.algorithm),
        };
        file.choices.insert(product.to_string(), stored);
        let written = serde_json::to_vec_pretty(&file)
            .map_err(Into::into)
            .and_then(|json| write(path, &json));
        if let Err(error) = written {
            tracing::warn!(path = %path.display(), %error, "a chosen algorithm cannot be kept");
        }
    }

    fn read(&self) -> File {
        let fresh = || File {
            device: self.device.clone(),
            library: self.library,
            choices: BTreeMap::new(),
        };
        self.path
            .as_ref()
            .and_then(|path| std::fs::read(path).ok())
            .and_then(|bytes| serde_json::from_slice::<File>(&bytes).ok())
            .filter(|file| file.device == self.device && file.library == self.library)
            .unwrap_or_else(fresh)
    }
}

fn checksum(product: &str, algorithm: &Algorithm) -> String {
    key([product.as_bytes(), bytemuck::cast_slice(&algorithm.0)])[..16].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "a device".to_string(),
            compute_capability: (9, 0),
            multiprocessors: 132,
            l2_bytes: 0,
            shared_bytes_per_block: 0,
            shared_bytes_per_multiprocessor: 0,
            registers_per_multiprocessor: 0,
            threads_per_multiprocessor: 0,
            memory_bytes: 0,
            driver_version: 13_000,
        }
    }

    fn choice(n: u64) -> Choice {
        Choice {
            algorithm: Algorithm([n; 8]),
            microseconds: 12.5,
            tried: 7,
        }
    }

    #[test]
    fn choices_are_kept_by_product_device_and_library() {
        let folder = tempfile::tempdir().unwrap();
        let location = CacheLocation::Folder(folder.path().to_path_buf());
        let file = ChoiceFile::new(&location, &info(), 130_000);
        assert!(file.load().is_empty());
        file.add("a", &choice(1));
        file.add("b", &choice(u64::MAX));
        file.add("a", &choice(3));
        let loaded = file.load();
        assert_eq!(loaded["a"], choice(3));
        assert_eq!(loaded["b"], choice(u64::MAX));
        assert!(ChoiceFile::new(&location, &info(), 130_001).load().is_empty());
        let other = DeviceInfo {
            multiprocessors: 114,
            ..info()
        };
        assert!(ChoiceFile::new(&location, &other, 130_000).load().is_empty());
    }

    #[test]
    fn an_edited_or_damaged_file_gives_no_choice() {
        let folder = tempfile::tempdir().unwrap();
        let file = ChoiceFile::new(&CacheLocation::Folder(folder.path().to_path_buf()), &info(), 1);
        file.add("a", &choice(1));
        let path = file.path.as_ref().unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        std::fs::write(path, text.replacen("        1,", "        2,", 1)).unwrap();
        assert!(file.load().is_empty());
        std::fs::write(path, &text[..text.len() / 2]).unwrap();
        assert!(file.load().is_empty());
        file.add("a", &choice(1));
        assert_eq!(file.load()["a"], choice(1));
    }
}
