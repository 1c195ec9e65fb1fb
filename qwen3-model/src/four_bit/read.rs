//! Where the tensors of a 4-bit module are, and whether they can be believed.
//!
//! ```text
//!   NAME.weight                                 any type, ceil(n / 2) bytes
//!   NAME.weight.quant_state.bitsandbytes__nf4   u8, JSON: quant_type, blocksize, dtype, shape [out, in] and,
//!                                               with double quantisation, nested_blocksize, nested_dtype, nested_offset
//!   NAME.weight.quant_map                       f32 [16]
//!   NAME.weight.absmax                          f32 [blocks], or u8 [blocks] with
//!   NAME.weight.nested_absmax                   f32 [ceil(blocks / nested_blocksize)]
//!   NAME.weight.nested_quant_map                f32 [256]
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype;
use serde_json::{Map, Value};

use super::quantize::decode_absmax;
use super::{Bytes, QuantType, QuantizedMatrix, ValueType};
use crate::checkpoint::Checkpoint;
use crate::json::kind;
use crate::mapped_file::MappedFile;
use crate::safetensors_file::TensorEntry;
use crate::{Error, Result};

/// Larger texts than this are no quant_state.
const MAX_STATE: usize = 1 << 16;
/// bitsandbytes' block sizes.
const BLOCKSIZES: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// The text `quant_state` of a module of each type.
fn state_name(module: &str, quant_type: QuantType) -> String {
    format!("{module}.weight.quant_state.bitsandbytes__{}", quant_type.name())
}

/// Whether a module is stored in 4 bits: its quant_state tells.
pub(crate) fn is_quantized(checkpoint: &Checkpoint, module: &str) -> bool {
    [QuantType::Nf4, QuantType::Fp4]
        .iter()
        .any(|&t| checkpoint.contains(&state_name(module, t)))
}

/// A 4-bit module whose tensors were all found, with types and sizes that fit each other.
pub(crate) struct Place {
    module: String,
    shape: [usize; 2],
    weight: Tensor,
    absmax: Tensor,
    map: Tensor,
    nested: Option<Nested>,
    state: State,
}

struct Nested {
    absmax: Tensor,
    map: Tensor,
    blocksize: usize,
    offset: f32,
}

struct State {
    quant_type: QuantType,
    blocksize: usize,
    value_type: ValueType,
}

struct Tensor {
    file: Arc<MappedFile>,
    entry: TensorEntry,
}

impl Tensor {
    fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.entry.bytes.clone()]
    }

    fn f32s(&self) -> Vec<f32> {
        let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        self.bytes().chunks_exact(4).map(value).collect()
    }
}

/// Errors about one module.
struct Module<'a> {
    name: &'a str,
    path: PathBuf,
}

impl Module<'_> {
    fn error(&self, problem: impl Into<String>) -> Error {
        Error::Quantization {
            path: self.path.clone(),
            module: self.name.to_owned(),
            problem: problem.into(),
        }
    }

    /// Takes a tensor of this type and number of elements out of the checkpoint.
    fn take(&self, checkpoint: &mut Checkpoint, suffix: &str, dtype: Dtype, len: usize) -> Result<Tensor> {
        let Some((file, entry)) = checkpoint.take_any(&format!("{}.weight.{suffix}", self.name)) else {
            return Err(self.error(format!("its `{suffix}` is missing")));
        };
        let found: usize = entry.shape.iter().product();
        if entry.dtype != dtype || found != len {
            let problem = format!(
                "its `{suffix}` is {:?} {:?}, {len} elements of {dtype:?} are needed",
                entry.dtype, entry.shape
            );
            return Err(self.error(problem));
        }
        Ok(Tensor { file, entry })
    }

    fn field<'v>(&self, state: &'v Map<String, Value>, field: &str) -> Result<&'v Value> {
        match state.get(field) {
            Some(value) if !value.is_null() => Ok(value),
            _ => Err(self.error(format!("its quant_state has no `{field}`"))),
        }
    }

    fn wrong(&self, field: &str, value: &Value, expected: &str) -> Error {
        self.error(format!(
            "its quant_state says `{field}` is {}, expected {expected}",
            kind(value)
        ))
    }

    fn size(&self, state: &Map<String, Value>, field: &str) -> Result<usize> {
        let value = self.field(state, field)?;
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.filter(|n| BLOCKSIZES.contains(n))
            .ok_or_else(|| self.wrong(field, value, "a power of two from 32 to 4096"))
    }
}

impl Place {
    /// Takes the tensors of `module`, of shape `[out, in]`, out of the checkpoint.
    ///
    /// # Errors
    /// [`Error::Quantization`] and [`Error::MissingTensor`]; values are not looked at.
    pub(crate) fn take(checkpoint: &mut Checkpoint, module: &str, shape: [usize; 2]) -> Result<Self> {
        let weight_name = format!("{module}.weight");
        let Some((file, entry)) = checkpoint.take_any(&weight_name) else {
            return Err(Error::MissingTensor {
                path: checkpoint.root().to_owned(),
                tensor: weight_name,
                shape: shape.to_vec(),
            });
        };
        let of = Module {
            name: module,
            path: file.path().to_owned(),
        };
        let (state, nested) = take_state(checkpoint, &of, shape)?;
        let elements = shape[0] * shape[1];
        let weight = Tensor { file, entry };
        // The type is only how the bytes were stored.
        if weight.bytes().len() != elements.div_ceil(2) {
            let problem = format!(
                "its weight has {} bytes, {} elements in 4 bits have {}",
                weight.bytes().len(),
                elements,
                elements.div_ceil(2)
            );
            return Err(of.error(problem));
        }
        let blocks = elements.div_ceil(state.blocksize);
        let map = of.take(checkpoint, "quant_map", Dtype::F32, 16)?;
        let (absmax, nested) = match nested {
            None => (of.take(checkpoint, "absmax", Dtype::F32, blocks)?, None),
            Some((blocksize, offset)) => {
                let nested = Nested {
                    absmax: of.take(
                        checkpoint,
                        "nested_absmax",
                        Dtype::F32,
                        blocks.div_ceil(blocksize),
                    )?,
                    map: of.take(checkpoint, "nested_quant_map", Dtype::F32, 256)?,
                    blocksize,
                    offset,
                };
                (of.take(checkpoint, "absmax", Dtype::U8, blocks)?, Some(nested))
            }
        };
        Ok(Self {
            module: module.to_owned(),
            shape,
            weight,
            absmax,
            map,
            nested,
            state,
        })
    }

    /// The file with the nibbles.
    pub(crate) fn path(&self) -> &Path {
        self.weight.file.path()
    }

    /// Reads the scales; the nibbles stay in the mapped file.
    ///
    /// # Errors
    /// [`Error::Quantization`] for a value that is not finite, or gives weights that are not.
    pub(crate) fn read(self) -> Result<QuantizedMatrix> {
        let of = Module {
            name: &self.module,
            path: self.weight.file.path().to_owned(),
        };
        let finite = |what: &str, values: &[f32]| match values.iter().position(|x| !x.is_finite()) {
            Some(at) => Err(of.error(format!("element {at} of its `{what}` is {}", values[at]))),
            None => Ok(()),
        };
        let values = self.map.f32s();
        finite("quant_map", &values)?;
        let mut map = [0.0; 16];
        map.copy_from_slice(&values);
        let absmax = match &self.nested {
            None => self.absmax.f32s(),
            Some(nested) => {
                let (scales, values) = (nested.absmax.f32s(), nested.map.f32s());
                finite("nested_absmax", &scales)?;
                finite("nested_quant_map", &values)?;
                let mut map = [0.0; 256];
                map.copy_from_slice(&values);
                decode_absmax(
                    self.absmax.bytes(),
                    &map,
                    &scales,
                    nested.blocksize,
                    nested.offset,
                )
            }
        };
        finite("absmax", &absmax)?;
        let largest = map.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        let fits = |absmax: &f32| self.state.value_type.round(absmax * largest).is_finite();
        if let Some(block) = absmax.iter().position(|absmax| !fits(absmax)) {
            let problem = format!(
                "the scale {} of block {block} gives weights that are not finite",
                absmax[block]
            );
            return Err(of.error(problem));
        }
        Ok(QuantizedMatrix {
            rows: self.shape[0],
            cols: self.shape[1],
            packed: Bytes::Mapped {
                bytes: self.weight.entry.bytes.clone(),
                file: self.weight.file.clone(),
            },
            absmax: Arc::new(absmax),
            map,
            blocksize: self.state.blocksize,
            quant_type: self.state.quant_type,
            value_type: self.state.value_type,
        })
    }
}

/// The quant_state; with double quantisation also block size and offset of the scales.
fn take_state(
    checkpoint: &mut Checkpoint,
    of: &Module<'_>,
    shape: [usize; 2],
) -> Result<(State, Option<(usize, f32)>)> {
    let found = [QuantType::Nf4, QuantType::Fp4].map(|t| (t, checkpoint.take_any(&state_name(of.name, t))));
    let (quant_type, file, entry) = match found {
        [(t, Some((file, entry))), (_, None)] | [(_, None), (t, Some((file, entry)))] => (t, file, entry),
        [(_, None), (_, None)] => return Err(of.error("its quant_state is missing")),
        _ => return Err(of.error("it has a quant_state for nf4 and one for fp4")),
    };
    let text = &file.bytes()[entry.bytes.clone()];
    if entry.dtype != Dtype::U8 || text.len() > MAX_STATE {
        let problem = format!(
            "its quant_state is {:?} {:?}, not a short text",
            entry.dtype, entry.shape
        );
        return Err(of.error(problem));
    }
    let state: Map<String, Value> = serde_json::from_slice(text)
        .map_err(|error| of.error(format!("its quant_state is not a JSON object: {error}")))?;
    let text = |field: &str, choices: &[&str]| -> Result<usize> {
        let value = of.field(&state, field)?;
        let at = choices.iter().position(|choice| value.as_str() == Some(choice));
        at.ok_or_else(|| of.wrong(field, value, &choices.join(", ")))
    };
    text("quant_type", &[quant_type.name()])?;
    let value_type = [ValueType::Bf16, ValueType::F16, ValueType::F32]
        [text("dtype", &["bfloat16", "float16", "float32"])?];
    let stated = of.field(&state, "shape")?;
    if *stated != serde_json::json!(shape) {
        let problem = format!("its quant_state says shape {stated}, the configuration asks for {shape:?}");
        return Err(of.error(problem));
    }
    let nested = match ["nested_blocksize", "nested_dtype", "nested_offset"]
        .iter()
        .any(|field| state.contains_key(*field))
    {
        false => None,
        true => {
            text("nested_dtype", &["float32"])?;
            let value = of.field(&state, "nested_offset")?;
            let offset = value.as_f64().map(|offset| offset as f32);
            let offset = offset.filter(|offset| offset.is_finite());
            let offset = offset.ok_or_else(|| of.wrong("nested_offset", value, "a finite number"))?;
            Some((of.size(&state, "nested_blocksize")?, offset))
        }
    };
    let state = State {
        quant_type,
        blocksize: of.size(&state, "blocksize")?,
        value_type,
    };
    Ok((state, nested))
}
