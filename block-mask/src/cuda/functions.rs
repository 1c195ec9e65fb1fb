//! Mask and score functions on the device.

use std::sync::Arc;

use cuda_graphs::{DeviceBuffer, Stream};

use super::CudaError;
use crate::codegen::cuda_source;
use crate::{MaskMod, ScoreMod};

/// A mask function, a score function, both or neither, printed as CUDA C, with the buffers that they captured in device
/// memory. Cheap to clone.
///
/// ```no_run
/// # use block_mask::cuda::*;
/// # use block_mask::*;
/// # use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// # use half::bf16;
/// # use paged_kv::{PageTable, PageTableConfig, Slot};
/// # let device = Device::open(0)?;
/// # let (stream, compiler) = (Stream::new(&device)?, Compiler::new()?);
/// # let shape = AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, page_size: 16, n_pages: 9 };
/// let functions = Functions::new(&stream, Some(&MaskMod::sliding_window(100)), None)?;
/// assert!(functions.has_mask() && !functions.has_score());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Functions {
    code: String,
    mask: bool,
    score: bool,
    memory: Option<Arc<Memory>>,
}

#[derive(Debug)]
struct Memory {
    /// `struct Captures`: the addresses of the buffers, then their lengths.
    captures: DeviceBuffer<u8>,
    /// What the addresses point to.
    _buffers: Vec<DeviceBuffer<u32>>,
}

impl Functions {
    /// Neither: the kernels without any function text.
    pub fn none() -> Functions {
        Functions::default()
    }

    /// Prints the functions and copies what they captured to the stream's device. Waits.
    ///
    /// # Errors
    /// [`CudaError::Cuda`]. Panics: none.
    pub fn new(
        stream: &Stream,
        mask: Option<&MaskMod>,
        score: Option<&ScoreMod>,
    ) -> Result<Functions, CudaError> {
        if mask.is_none() && score.is_none() {
            return Ok(Functions::none());
        }
        let all = MaskMod::all();
        let source = cuda_source(mask.unwrap_or(&all), score);
        let mut buffers = Vec::new();
        for ints in &source.ints {
            buffers.push(DeviceBuffer::from_slice(
                stream,
                bytemuck::cast_slice(ints.values()),
            )?);
        }
        for floats in &source.floats {
            buffers.push(DeviceBuffer::from_slice(
                stream,
                bytemuck::cast_slice(floats.values()),
            )?);
        }
        let addresses: Vec<u64> = buffers.iter().map(DeviceBuffer::ptr).collect();
        let bytes = source.captures_bytes(&addresses).unwrap_or_default();
        let captures = DeviceBuffer::from_slice(stream, &bytes)?;
        Ok(Functions {
            code: source.code,
            mask: mask.is_some(),
            score: score.is_some(),
            memory: Some(Arc::new(Memory {
                captures,
                _buffers: buffers,
            })),
        })
    }

    /// The text alone, for compiling without a device.
    pub(crate) fn text_only(mask: Option<&MaskMod>, score: Option<&ScoreMod>) -> Functions {
        let all = MaskMod::all();
        let code = cuda_source(mask.unwrap_or(&all), score).code;
        Functions {
            code,
            mask: mask.is_some(),
            score: score.is_some(),
            memory: None,
        }
    }

    /// Whether there is a mask function.
    pub fn has_mask(&self) -> bool {
        self.mask
    }

    /// Whether there is a score function.
    pub fn has_score(&self) -> bool {
        self.score
    }

    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// Device address of `struct Captures`, 0 without functions; a graph being captured keeps the memory.
    pub(crate) fn captures(&self, stream: &Stream) -> u64 {
        self.memory.as_ref().map_or(0, |memory| {
            stream.keep(memory);
            memory.captures.ptr()
        })
    }
}
