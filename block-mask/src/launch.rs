//! One safe launch function per kernel: the one module of this crate with `unsafe`.
//!
//! Each function checks lengths, strides and alignment against what the kernel reads and writes, so that no launch
//! leaves the slices it is given. What the kernels find in device memory they check themselves: slots outside the table,
//! lengths beyond it, rows beyond the buffers.
#![allow(unsafe_code)]

mod decode;
mod flex;
mod prefill;

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceSlice, Kernel, Stream};
use half::bf16;

use crate::cuda::{AttentionShape, CudaError};

pub(crate) use decode::*;
pub(crate) use flex::*;
pub(crate) use prefill::*;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Paging {
    table: u64,
    head_stride: i64,
    max_pages: i32,
    page_shift: i32,
}

/// Sizes of a page table in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableShape {
    pub(crate) n_slots: usize,
    pub(crate) max_pages: usize,
}

fn equal(what: &'static str, expected: usize, found: usize) -> Result<(), CudaError> {
    if expected == found {
        Ok(())
    } else {
        Err(CudaError::Mismatch {
            what,
            expected,
            found,
        })
    }
}

fn at_least(what: &'static str, expected: usize, found: usize) -> Result<(), CudaError> {
    if found >= expected {
        Ok(())
    } else {
        Err(CudaError::Mismatch {
            what,
            expected,
            found,
        })
    }
}

fn aligned<T: Pod>(what: &'static str, slice: DeviceSlice<'_, T>, bytes: u64) -> Result<(), CudaError> {
    if slice.ptr().is_multiple_of(bytes) {
        Ok(())
    } else {
        Err(CudaError::Misaligned { what, bytes })
    }
}

fn int(what: &'static str, value: usize) -> Result<i32, CudaError> {
    i32::try_from(value).map_err(|_| CudaError::TooMany {
        what,
        asked: value,
        limit: i32::MAX as usize,
    })
}

/// Slices must be of the kernel's device; the stream is checked by the launch. A graph being captured keeps their memory.
fn here<T: Pod>(
    kernel: &Kernel,
    stream: &Stream,
    what: &'static str,
    slice: DeviceSlice<'_, T>,
) -> Result<(), CudaError> {
    if slice.device() == kernel.device() {
        stream.keep_memory(slice);
        Ok(())
    } else {
        Err(cuda_graphs::Error::WrongDevice { what }.into())
    }
}

fn check_cache(
    kernel: &Kernel,
    stream: &Stream,
    shape: &AttentionShape,
    k: DeviceSlice<'_, bf16>,
    v: DeviceSlice<'_, bf16>,
) -> Result<(), CudaError> {
    shape.check()?;
    for (what, slice) in [("keys", k), ("values", v)] {
        here(kernel, stream, what, slice)?;
        equal(what, shape.cache_len(), slice.len())?;
        aligned(what, slice, 16)?;
    }
    Ok(())
}

fn paging(
    kernel: &Kernel,
    stream: &Stream,
    shape: &AttentionShape,
    table: DeviceSlice<'_, i32>,
    of: TableShape,
) -> Result<Paging, CudaError> {
    here(kernel, stream, "page table", table)?;
    equal("page table", of.n_slots.saturating_mul(of.max_pages), table.len())?;
    Ok(Paging {
        table: table.ptr(),
        head_stride: shape.head_stride() as i64,
        max_pages: int("pages of a slot", of.max_pages)?,
        page_shift: shape.page_shift(),
    })
}

/// Elements that rows of `row` elements, `stride` apart, reach. Strides keep 16-byte words whole.
fn check_rows(
    what: &'static str,
    slice: DeviceSlice<'_, bf16>,
    rows: usize,
    row: usize,
    stride: usize,
) -> Result<(), CudaError> {
    if !stride.is_multiple_of(8) {
        return Err(CudaError::Misaligned { what, bytes: 16 });
    }
    aligned(what, slice, 16)?;
    at_least(what, row, stride)?;
    if rows == 0 {
        return Ok(());
    }
    at_least(
        what,
        (rows - 1).saturating_mul(stride).saturating_add(row),
        slice.len(),
    )
}
