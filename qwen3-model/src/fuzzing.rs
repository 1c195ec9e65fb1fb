//! The loaders that read from files, on bytes: for the fuzz target, not part of the API.

use std::path::Path;

use crate::Result;
use crate::checkpoint::index_shards;
use crate::json::{Fields, parse_object};
use crate::safetensors_file::read_header;

/// Bytes of every tensor of a safetensors file.
pub fn header(bytes: &[u8]) -> Result<Vec<usize>> {
    let entries = read_header(Path::new("model.safetensors"), bytes)?;
    Ok(entries.values().map(|entry| entry.bytes.len()).collect())
}

/// Shards that an index names.
pub fn index(json: &[u8]) -> Result<Vec<String>> {
    let path = Path::new("model.safetensors.index.json");
    let object = parse_object(path, json)?;
    Ok(index_shards(&Fields::new(path, &object))?.into_keys().collect())
}
