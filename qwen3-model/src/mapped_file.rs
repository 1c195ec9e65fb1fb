//! The one place with `unsafe`: a read-only memory map of a file.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file mapped into memory, read-only.
///
/// As with every memory map, the file must not shrink while it is mapped: a read past the new end
/// ends the process. Model files are written once; replace them by renaming, never in place.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            let problem = "not a regular file".into();
            return Err(Error::Header {
                path: path.to_owned(),
                problem,
            });
        }
        // SAFETY: the map is private to this struct and never written through. Another process
        // that changes the file while it is mapped is outside of what can be checked here; it is
        // documented above and in the crate's README.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            map,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}
