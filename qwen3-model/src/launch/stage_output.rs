//! What becomes of a product of a decode step, for the kernels that have the operations around it inside.

use cuda_graphs::{DeviceSlice, Stream};
use half::bf16;

use super::{refuse, same};
use crate::Result;

/// What becomes of a product of a weight of N rows.
#[derive(Debug, Clone, Copy)]
pub enum StageOutput<'a> {
    /// `residual += product`, `normed = bf16(residual * norm)`, and the sums of squares by which the consumer of
    /// `normed` must scale.
    Residual {
        /// `[rows, N]`.
        residual: DeviceSlice<'a, f32>,
        /// `[N]`, weight of the norm that follows.
        norm: DeviceSlice<'a, f32>,
        /// `[rows, N]`.
        normed: DeviceSlice<'a, bf16>,
        /// As the kernel cuts them: see [`FourBitLayer::blocks`](super::FourBitLayer::blocks) and
        /// [`WideProducts::squares_len`](super::WideProducts::squares_len).
        squares: DeviceSlice<'a, f32>,
    },
    /// `silu(gate) * up`, the weight being gate above up; `[rows, N / 2]`.
    Gated(DeviceSlice<'a, bf16>),
    /// The product, `[rows, N]`.
    Bf16(DeviceSlice<'a, bf16>),
    /// The product, `[rows, N]`.
    F32(DeviceSlice<'a, f32>),
}

/// An output whose lengths are right, as kernels take it. Addresses of what it lacks are 0.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OutputParams {
    /// As the kernels number them: residual, gated, bf16, f32.
    pub kind: u32,
    /// Columns of `out`.
    pub units: usize,
    pub out: u64,
    pub norm: u64,
    pub normed: u64,
    pub squares_out: u64,
}

/// Checks the length of the sums of squares that scale a product, keeps them for a capture of `stream`, and gives their address,
/// 0 for none.
pub(super) fn accept_squares(
    stream: &Stream,
    squares: Option<DeviceSlice<'_, f32>>,
    expected: usize,
) -> Result<u64> {
    let Some(squares) = squares else {
        return Ok(0);
    };
    same("squares", squares.len(), expected)?;
    stream.keep_memory(squares);
    Ok(squares.ptr())
}

impl StageOutput<'_> {
    /// Checks the lengths for a weight of `n` rows and `rows` batch rows, and keeps the memory for a capture of `stream`.
    pub(super) fn accept(
        &self,
        stream: &Stream,
        rows: usize,
        n: usize,
        squares_len: usize,
    ) -> Result<OutputParams> {
        let plain = |kind, units, out| OutputParams {
            kind,
            units,
            out,
            ..OutputParams::default()
        };
        match *self {
            StageOutput::Residual {
                residual,
                norm,
                normed,
                squares,
            } => {
                same("residual", residual.len(), rows * n)?;
                same("norm", norm.len(), n)?;
                same("normed", normed.len(), rows * n)?;
                same("squares", squares.len(), squares_len)?;
                for buffer in [residual, norm, squares] {
                    stream.keep_memory(buffer);
                }
                stream.keep_memory(normed);
                Ok(OutputParams {
                    norm: norm.ptr(),
                    normed: normed.ptr(),
                    squares_out: squares.ptr(),
                    ..plain(0, n, residual.ptr())
                })
            }
            StageOutput::Gated(out) => {
                if !n.is_multiple_of(2) {
                    return refuse("weight", format!("has {n} rows, which are no gate and up"));
                }
                same("output", out.len(), rows * (n / 2))?;
                stream.keep_memory(out);
                Ok(plain(1, n / 2, out.ptr()))
            }
            StageOutput::Bf16(out) => {
                same("output", out.len(), rows * n)?;
                stream.keep_memory(out);
                Ok(plain(2, n, out.ptr()))
            }
            StageOutput::F32(out) => {
                same("output", out.len(), rows * n)?;
                stream.keep_memory(out);
                Ok(plain(3, n, out.ptr()))
            }
        }
    }
}
