//! Descriptors for the tensor memory accelerator (compute capability 9.0 and newer).

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys;

use crate::buffer::DeviceSlice;
use crate::driver::cu;
use crate::error::{Error, Result};

/// The 128-byte descriptor of a tensor in device memory, to be part of a kernel's parameter struct.
///
/// In the kernel it is a member `alignas(64) char map[128]`, whose address `cp.async.bulk.tensor` takes.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let matrix = DeviceBuffer::<u16>::zeroed(&device, 64 * 128)?; // bf16
/// let spec = TensorMapSpec {
///     element: TensorElement::Bf16,
///     dims: &[128, 64],
///     strides: &[256],
///     box_dims: &[64, 16],
///     swizzle: Swizzle::Bytes128,
/// };
/// let map = TensorMap::tiled(matrix.as_slice(), &spec)?; // a member of a kernel's parameters
/// assert_eq!(size_of_val(&map), 128);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct TensorMap {
    opaque: [u64; 16],
}

const _: () = assert!(size_of::<TensorMap>() == 128);

/// Element types of a [`TensorMap`].
///
/// ```
/// use cuda_graphs::TensorElement;
///
/// assert_eq!((TensorElement::Bf16.bytes(), TensorElement::F32.bytes()), (2, 4));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorElement {
    /// Unsigned bytes.
    U8,
    /// bfloat16.
    Bf16,
    /// 32-bit floats.
    F32,
}

impl TensorElement {
    /// Bytes per element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// How a box is laid out in shared memory: 16-byte pieces exchanged within rows of this many bytes, so that reading a
/// column meets no bank twice.
///
/// ```
/// use cuda_graphs::Swizzle;
///
/// assert_eq!(Swizzle::default(), Swizzle::None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Swizzle {
    /// As it is.
    #[default]
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

/// What a [`TensorMap`] describes. Dimensions go from the innermost (contiguous) to the outermost.
///
/// ```
/// use cuda_graphs::{Swizzle, TensorElement, TensorMapSpec};
///
/// // A matrix of 4,096 rows of 2,560 bf16, in boxes of 64 columns by 16 rows.
/// let spec = TensorMapSpec {
///     element: TensorElement::Bf16,
///     dims: &[2560, 4096],
///     strides: &[5120],
///     box_dims: &[64, 16],
///     swizzle: Swizzle::Bytes128,
/// };
/// assert_eq!(u64::from(spec.box_dims[0]) * spec.element.bytes(), 128, "a row of a box");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMapSpec<'a> {
    /// Element type.
    pub element: TensorElement,
    /// Elements in each of 1 to 5 dimensions.
    pub dims: &'a [u64],
    /// Bytes from one element to the next in each dimension but the innermost: one fewer than `dims`.
    pub strides: &'a [u64],
    /// Elements that one copy brings, in each dimension.
    pub box_dims: &'a [u32],
    /// Layout in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMapSpec<'_> {
    /// Checks everything the hardware demands of a tensor at address `pointer` in `bytes` bytes of memory.
    fn check(&self, pointer: u64, bytes: u64) -> Result<(), String> {
        let rank = self.dims.len();
        if !(1..=5).contains(&rank) {
            return Err(format!("{rank} dimensions; 1 to 5 are possible"));
        }
        if self.strides.len() != rank - 1 || self.box_dims.len() != rank {
            return Err(format!(
                "{rank} dimensions need {} strides and {rank} box dimensions, not {} and {}",
                rank - 1,
                self.strides.len(),
                self.box_dims.len()
            ));
        }
        if !pointer.is_multiple_of(16) {
            return Err(format!("the address {pointer:#x} is no multiple of 16"));
        }
        if let Some(dim) = self.dims.iter().find(|&&dim| dim == 0 || dim > 1 << 32) {
            return Err(format!("a dimension of {dim}; 1 to 2^32 are possible"));
        }
        if let Some(stride) = self
            .strides
            .iter()
            .find(|&&s| !s.is_multiple_of(16) || s == 0 || s >= 1 << 40)
        {
            return Err(format!(
                "a stride of {stride} bytes; multiples of 16 below 2^40 are possible"
            ));
        }
        if let Some(dim) = self.box_dims.iter().find(|&&dim| dim == 0 || dim > 256) {
            return Err(format!("a box dimension of {dim}; 1 to 256 are possible"));
        }
        let row = u64::from(self.box_dims[0]) * self.element.bytes();
        if !row.is_multiple_of(16) {
            return Err(format!("box rows of {row} bytes; multiples of 16 are possible"));
        }
        let span = match self.swizzle {
            Swizzle::None => u64::MAX,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        };
        if row > span {
            return Err(format!("box rows of {row} bytes do not fit a swizzle of {span}"));
        }
        let end = self.dims.iter().skip(1).zip(self.strides).try_fold(
            self.dims[0]
                .checked_mul(self.element.bytes())
                .ok_or("the tensor is too large")?,
            |end, (dim, stride)| end.checked_add((dim - 1).checked_mul(*stride)?).ok_or(()).ok(),
        );
        match end {
            Some(end) if end <= bytes => Ok(()),
            Some(end) => Err(format!("the tensor spans {end} bytes, the memory has {bytes}")),
            None => Err("the tensor is too large".to_string()),
        }
    }
}

impl TensorMap {
    /// Describes a tensor that lies in `memory`. The map holds the memory's address, not a share of it.
    ///
    /// What a box reaches beyond the tensor reads as 0 and is not written.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the rule that is broken, also on devices without the accelerator;
    /// [`Error::Driver`].
    pub fn tiled<T: Pod>(memory: DeviceSlice<'_, T>, spec: &TensorMapSpec<'_>) -> Result<Self> {
        let refuse = |why: String| Error::InvalidArgument {
            what: "tensor map",
            why,
        };
        let info = memory.device().info();
        if !info.has_tma() {
            return Err(refuse(format!("{} has no tensor memory accelerator", info.name)));
        }
        spec.check(memory.ptr(), memory.byte_len() as u64)
            .map_err(refuse)?;
        memory.device().bind()?;
        use sys::CUtensorMapDataType as Type;
        let data_type = match spec.element {
            TensorElement::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            TensorElement::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            TensorElement::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        let swizzle = match spec.swizzle {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        // Never empty, so that its address is good even for one dimension, which has no stride.
        let strides: Vec<u64> = spec.strides.iter().copied().chain([0]).collect();
        let element_strides = [1u32; 5];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: all arrays have the length that the rank asks for, checked above; the map is as aligned as its type
        // says, and the call only encodes.
        unsafe {
            cu!(cuTensorMapEncodeTiled(
                &mut map,
                data_type,
                spec.dims.len() as u32,
                memory.ptr() as *mut std::ffi::c_void,
                spec.dims.as_ptr(),
                strides.as_ptr(),
                spec.box_dims.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ))
        }?;
        Ok(Self { opaque: map.opaque })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: TensorMapSpec<'static> = TensorMapSpec {
        element: TensorElement::Bf16,
        dims: &[2560, 6144],
        strides: &[5120],
        box_dims: &[64, 128],
        swizzle: Swizzle::Bytes128,
    };
    const BYTES: u64 = 2560 * 6144 * 2;

    #[test]
    fn a_weight_matrix_in_boxes_of_128_bytes_is_fine() {
        assert_eq!(GOOD.check(256, BYTES), Ok(()));
        let vector = TensorMapSpec {
            dims: &[2560],
            strides: &[],
            box_dims: &[256],
            swizzle: Swizzle::None,
            ..GOOD
        };
        assert_eq!(vector.check(0, 5120), Ok(()));
    }

    #[test]
    fn what_the_hardware_refuses_is_refused_with_the_rule() {
        let refused = |spec: &TensorMapSpec<'_>, pointer, bytes, rule: &str| {
            let why = spec.check(pointer, bytes).unwrap_err();
            assert!(why.contains(rule), "{why}");
        };
        refused(&GOOD, 8, BYTES, "multiple of 16");
        refused(&GOOD, 0, BYTES - 1, "the memory has");
        refused(&TensorMapSpec { dims: &[], ..GOOD }, 0, BYTES, "1 to 5");
        refused(
            &TensorMapSpec {
                dims: &[1; 6],
                ..GOOD
            },
            0,
            BYTES,
            "1 to 5",
        );
        refused(&TensorMapSpec { strides: &[], ..GOOD }, 0, BYTES, "strides");
        refused(
            &TensorMapSpec {
                dims: &[0, 2],
                ..GOOD
            },
            0,
            BYTES,
            "a dimension of 0",
        );
        refused(
            &TensorMapSpec {
                strides: &[5118],
                ..GOOD
            },
            0,
            BYTES,
            "a stride of 5118",
        );
        refused(
            &TensorMapSpec {
                box_dims: &[64, 257],
                ..GOOD
            },
            0,
            BYTES,
            "box dimension of 257",
        );
        refused(
            &TensorMapSpec {
                box_dims: &[4, 8],
                ..GOOD
            },
            0,
            BYTES,
            "box rows of 8",
        );
        refused(
            &TensorMapSpec {
                box_dims: &[128, 8],
                ..GOOD
            },
            0,
            BYTES,
            "swizzle of 128",
        );
        let huge = TensorMapSpec {
            dims: &[1 << 32; 5],
            strides: &[(1 << 40) - 16; 4],
            box_dims: &[64; 5],
            ..GOOD
        };
        refused(&huge, 0, u64::MAX, "too large");
    }
}
