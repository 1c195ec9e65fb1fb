//! The safetensors files of a model folder: one file, or shards and their index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype;

use crate::json::{Fields, kind, read_object};
use crate::mapped_file::MappedFile;
use crate::safetensors_file::{TensorEntry, read_header};
use crate::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of a model folder, each with the mapped file that holds it.
///
/// Opening reads headers only. Tensors are taken out one by one; what remains at the end is an
/// error, since a tensor that nobody uses means that the model is not the one described.
pub(crate) struct Checkpoint {
    /// Single file or index, for messages about tensors that are nowhere.
    root: PathBuf,
    tensors: BTreeMap<String, (Arc<MappedFile>, TensorEntry)>,
}

impl Checkpoint {
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let files = safetensors_files(dir)?;
        let index = dir.join(INDEX);
        if index.exists() {
            Self::open_sharded(dir, index, &files)
        } else {
            Self::open_single(dir, &files)
        }
    }

    fn open_single(dir: &Path, files: &BTreeSet<String>) -> Result<Self> {
        let no_weights = |problem: String| Error::NoWeights {
            dir: dir.to_owned(),
            problem,
        };
        if !files.contains(SINGLE) {
            return Err(no_weights(match files.first() {
                Some(shard) => format!("holds `{shard}` but neither `{SINGLE}` nor `{INDEX}`"),
                None if dir.join("pytorch_model.bin").exists() => {
                    format!("holds `pytorch_model.bin` but no `{SINGLE}`; convert the model to safetensors")
                }
                None => format!("holds no `{SINGLE}` and no `{INDEX}`"),
            }));
        }
        if let Some(stray) = files.iter().find(|name| *name != SINGLE) {
            return Err(Error::StrayShard {
                path: dir.join(stray),
            });
        }
        let root = dir.join(SINGLE);
        let file = Arc::new(MappedFile::open(&root)?);
        let tensors = read_header(&root, file.bytes())?
            .into_iter()
            .map(|(name, entry)| (name, (file.clone(), entry)))
            .collect();
        Ok(Self { root, tensors })
    }

    fn open_sharded(dir: &Path, index: PathBuf, files: &BTreeSet<String>) -> Result<Self> {
        let shards = read_index(&index)?;
        for (shard, tensors) in &shards {
            if !files.contains(shard) {
                return Err(Error::MissingShard {
                    index,
                    shard: shard.clone(),
                    tensors: tensors.len(),
                    tensor: tensors.first().cloned().unwrap_or_default(),
                });
            }
        }
        if let Some(stray) = files.iter().find(|name| !shards.contains_key(*name)) {
            return Err(Error::StrayShard {
                path: dir.join(stray),
            });
        }
        let mut tensors = BTreeMap::new();
        for (shard, expected) in shards {
            let path = dir.join(shard);
            let file = Arc::new(MappedFile::open(&path)?);
            let entries = read_header(&path, file.bytes())?;
            let tensor_error = |tensor: &String, problem: &str| Error::Tensor {
                path: path.clone(),
                tensor: tensor.clone(),
                problem: problem.into(),
            };
            if let Some(absent) = expected.iter().find(|name| !entries.contains_key(*name)) {
                return Err(tensor_error(
                    absent,
                    "the index places it in this file, but it is not there",
                ));
            }
            if let Some(extra) = entries.keys().find(|name| !expected.contains(*name)) {
                return Err(tensor_error(extra, "the index does not place it in this file"));
            }
            tensors.extend(
                entries
                    .into_iter()
                    .map(|(name, entry)| (name, (file.clone(), entry))),
            );
        }
        Ok(Self { root: index, tensors })
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Single file or index, for messages.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Removes a tensor as it is.
    pub(crate) fn take_any(&mut self, name: &str) -> Option<(Arc<MappedFile>, TensorEntry)> {
        self.tensors.remove(name)
    }

    /// Removes a tensor, checked for type and shape.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<(Arc<MappedFile>, TensorEntry)> {
        let Some((file, entry)) = self.tensors.remove(name) else {
            let (tensor, shape) = (name.to_owned(), shape.to_vec());
            return Err(Error::MissingTensor {
                path: self.root.clone(),
                tensor,
                shape,
            });
        };
        if entry.shape != shape {
            return Err(Error::TensorShape {
                path: file.path().to_owned(),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                found: entry.shape,
            });
        }
        if !matches!(entry.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            let dtype = format!("{:?}", entry.dtype);
            return Err(Error::TensorDtype {
                path: file.path().to_owned(),
                tensor: name.to_owned(),
                dtype,
            });
        }
        Ok((file, entry))
    }

    /// An error for the first tensor that was not taken.
    pub(crate) fn finish(self) -> Result<()> {
        match self.tensors.into_iter().next() {
            Some((tensor, (file, _))) => Err(Error::ExtraTensor {
                path: file.path().to_owned(),
                tensor,
            }),
            None => Ok(()),
        }
    }
}

/// Names of the `*.safetensors` files directly in `dir`.
fn safetensors_files(dir: &Path) -> Result<BTreeSet<String>> {
    let io = |source| Error::Io {
        path: dir.to_owned(),
        source,
    };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if let Some(name) = name.to_str().filter(|name| name.ends_with(".safetensors")) {
            names.insert(name.to_owned());
        }
    }
    Ok(names)
}

/// Shard → tensors that the index places there.
fn read_index(index: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let object = read_object(index)?;
    index_shards(&Fields::new(index, &object))
}

pub(crate) fn index_shards(fields: &Fields<'_>) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let map = fields
        .object("weight_map")?
        .ok_or_else(|| fields.error("weight_map", "is missing"))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, value) in map.entries() {
        let shard = value
            .as_str()
            .ok_or_else(|| map.error(tensor, format!("is {}, expected a file name", kind(value))))?;
        // A name with a separator could point anywhere.
        if shard.contains(['/', '\\']) || !shard.ends_with(".safetensors") {
            return Err(map.error(
                tensor,
                format!("is {shard:?}, expected a safetensors file in this folder"),
            ));
        }
        shards.entry(shard.to_owned()).or_default().insert(tensor.clone());
    }
    if shards.is_empty() {
        return Err(fields.error("weight_map", "is empty"));
    }
    Ok(shards)
}
