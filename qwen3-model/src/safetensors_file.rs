//! One safetensors file: its header, checked against the file's size before any tensor is used.
//!
//! ```text
//! ┌─────────────┬──────────────────────────┬──────────────────────────────────────┐
//! │ u64 LE: n   │ n bytes of JSON          │ tensor data                          │
//! └─────────────┴──────────────────────────┴──────────────────────────────────────┘
//!                 name → dtype, shape,       offsets count from here, no gaps,
//!                 data_offsets [begin, end)  no overlaps, nothing after the last
//! ```
//!
//! The header is parsed here rather than by the safetensors crate's reader because a damaged file
//! must be reported with the name of the damaged tensor.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::Value;

use crate::json::parse_object;
use crate::{Error, Result};

/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor's type, shape and place in the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TensorEntry {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Bytes from the beginning of the file.
    pub(crate) bytes: Range<usize>,
}

/// Reads and checks the header of a file whose content is `bytes`. `path` is for messages.
pub(crate) fn read_header(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, TensorEntry>> {
    let header_error = |problem: String| Error::Header {
        path: path.to_owned(),
        problem,
    };
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(header_error(format!(
            "has {} bytes, too few for a safetensors file",
            bytes.len()
        )));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(header_error(format!(
            "not a safetensors file: its header would have {length} bytes"
        )));
    }
    let length = length as usize;
    let Some(header) = rest.get(..length) else {
        let problem = format!("is truncated within its header of {length} bytes");
        return Err(header_error(problem));
    };
    let data = 8 + length..bytes.len();
    let mut entries = BTreeMap::new();
    for (name, value) in parse_object(path, header)? {
        if name == "__metadata__" {
            continue;
        }
        let entry = read_entry(path, &name, value, &data)?;
        entries.insert(name, entry);
    }
    check_layout(path, &entries, &data)?;
    Ok(entries)
}

fn tensor_error(path: &Path, tensor: &str, problem: impl Into<String>) -> Error {
    Error::Tensor {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
        problem: problem.into(),
    }
}

fn read_entry(path: &Path, name: &str, value: Value, data: &Range<usize>) -> Result<TensorEntry> {
    let TensorInfo {
        dtype,
        shape,
        data_offsets: (begin, end),
    } = serde_json::from_value(value)
        .map_err(|error| tensor_error(path, name, format!("its header entry is unreadable: {error}")))?;
    if begin > end {
        return Err(tensor_error(
            path,
            name,
            format!("ends at byte {end}, before it begins at {begin}"),
        ));
    }
    if end > data.len() {
        let problem = format!(
            "ends at data byte {end}, but the file ends at {}: truncated",
            data.len()
        );
        return Err(tensor_error(path, name, problem));
    }
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size));
    if bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != end - begin) {
        let problem = format!(
            "has {} bytes, which is not what {shape:?} of {dtype:?} takes",
            end - begin
        );
        return Err(tensor_error(path, name, problem));
    }
    Ok(TensorEntry {
        dtype,
        shape,
        bytes: data.start + begin..data.start + end,
    })
}

fn check_layout(path: &Path, entries: &BTreeMap<String, TensorEntry>, data: &Range<usize>) -> Result<()> {
    let mut by_place: Vec<_> = entries.iter().collect();
    by_place.sort_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    let mut end = data.start;
    for (name, entry) in by_place {
        if entry.bytes.start < end {
            return Err(tensor_error(path, name, "overlaps another tensor"));
        }
        if entry.bytes.start > end {
            return Err(tensor_error(path, name, "has unexplained bytes before it"));
        }
        end = entry.bytes.end;
    }
    if end != data.end {
        let problem = format!("has {} bytes after its last tensor", data.end - end);
        return Err(Error::Header {
            path: path.to_owned(),
            problem,
        });
    }
    Ok(())
}
