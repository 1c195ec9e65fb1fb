//! Adapter tensors: checked, and widened to f32 (exact for f16 and bf16).

use crate::{Error, Result};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;
use std::sync::Arc;

/// The values of one borrowed tensor, row-major.
///
/// ```
/// use half::bf16;
/// use lora_merge::{Adapter, AdapterConfig, TensorSlice, TensorValues};
///
/// let (a, b) = ([bf16::ONE; 2], [bf16::ONE; 2]);
/// let tensors = [
///     TensorSlice { name: "q_proj.lora_A.weight", shape: &[1, 2], values: TensorValues::Bf16(&a) },
///     TensorSlice { name: "q_proj.lora_B.weight", shape: &[2, 1], values: TensorValues::Bf16(&b) },
/// ];
/// assert_eq!(Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &tensors)?.bytes(), 16);
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TensorValues<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// 16-bit IEEE floats.
    F16(&'a [f16]),
    /// 16-bit brain floats.
    Bf16(&'a [bf16]),
}

/// One borrowed tensor of an adapter, named as in a PEFT file.
///
/// ```
/// use lora_merge::{Adapter, AdapterConfig, TensorSlice, TensorValues};
///
/// let a = TensorSlice { name: "q_proj.lora_A.weight", shape: &[1, 3], values: TensorValues::F32(&[1.0, 2.0]) };
/// let error = Adapter::from_tensors(AdapterConfig::new(1, 1.0, ["q_proj"]), &[a]).unwrap_err();
/// assert!(error.to_string().contains("q_proj.lora_A.weight"), "three values are two: {error}");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TensorSlice<'a> {
    /// Name, for instance `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub name: &'a str,
    /// Shape, outermost dimension first.
    pub shape: &'a [usize],
    /// Values, row-major.
    pub values: TensorValues<'a>,
}

/// A tensor held by an adapter: f32 values, the type they were stored in, and the digest of the stored bytes.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Arc<[f32]>,
    /// The bits that any value has: tells which narrower types hold all of them.
    pub(crate) bits: u32,
    pub(crate) digest: [u8; 32],
}

impl Tensor {
    /// Reads little-endian bytes.
    pub(crate) fn from_bytes(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<Self> {
        let width = match dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => {
                return Err(Error::TensorDtype {
                    tensor: name.to_owned(),
                    dtype: format!("{other:?}"),
                });
            }
        };
        let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let expected = elements.and_then(|n| n.checked_mul(width)).unwrap_or(usize::MAX);
        if bytes.len() != expected {
            return Err(Error::TensorBytes {
                tensor: name.to_owned(),
                expected,
                found: bytes.len(),
            });
        }
        let values: Arc<[f32]> = match dtype {
            Dtype::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Dtype::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            _ => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
        };
        if let Some(index) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::NotFinite {
                tensor: name.to_owned(),
                index,
                value: values[index],
            });
        }
        let bits = bits(&values);
        let dtype = match dtype {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            _ => "BF16",
        };
        Ok(Self {
            shape: shape.to_vec(),
            digest: crate::digest::tensor_digest(dtype, shape, bytes),
            bits,
            values,
        })
    }
}

/// The bits that any value has.
pub(crate) fn bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |bits, v| bits | v.to_bits())
}

/// Reads a safetensors container into (name, tensor) pairs, in parallel.
pub(crate) fn from_safetensors(bytes: &[u8]) -> Result<Vec<(String, Tensor)>> {
    let file = safetensors::SafeTensors::deserialize(bytes).map_err(|e| Error::Container {
        reason: e.to_string(),
    })?;
    let views = file.tensors();
    let each = views.into_par_iter().map(|(name, view)| {
        let tensor = Tensor::from_bytes(&name, view.dtype(), view.shape(), view.data())?;
        Ok((name, tensor))
    });
    each.collect()
}

/// Copies borrowed tensors.
pub(crate) fn from_slices(slices: &[TensorSlice<'_>]) -> Result<Vec<(String, Tensor)>> {
    let each = slices.par_iter().map(|slice| {
        let (dtype, bytes): (_, std::borrow::Cow<'_, [u8]>) = match slice.values {
            TensorValues::F32(v) => (Dtype::F32, little_endian(v)),
            TensorValues::F16(v) => (Dtype::F16, little_endian(v)),
            TensorValues::Bf16(v) => (Dtype::BF16, little_endian(v)),
        };
        Ok((
            slice.name.to_owned(),
            Tensor::from_bytes(slice.name, dtype, slice.shape, &bytes)?,
        ))
    });
    each.collect()
}

/// The little-endian bytes of a slice: borrowed on little-endian machines.
pub(crate) fn little_endian<T: bytemuck::Pod>(values: &[T]) -> std::borrow::Cow<'_, [u8]> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    if cfg!(target_endian = "little") {
        return bytes.into();
    }
    bytes
        .chunks_exact(size_of::<T>())
        .flat_map(|c| c.iter().rev().copied())
        .collect::<Vec<u8>>()
        .into()
}
