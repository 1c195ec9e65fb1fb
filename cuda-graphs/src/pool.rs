//! Scratch memory that all buckets of a graph cache share.
//!
//! Graphs of one stream never run at the same time, so their scratch memory may be the same. The pool hands out
//! pieces in order and starts over at [`MemoryPool::reset`]; the same requests in the same order get the same
//! addresses. Capturing the largest bucket first makes the pool as large as it will ever be.
//!
//! ```text
//! reset ─▶ alloc A ─▶ alloc B            reset ─▶ alloc A' ─▶ alloc B'      (a smaller bucket)
//! ┌─────────────┬─────────┬─────┐       ┌──────┬─────┬──────────────────┐
//! │ A           │ B       │     │       │ A'   │ B'  │                  │   the same memory
//! └─────────────┴─────────┴─────┘       └──────┴─────┴──────────────────┘
//! ```

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use crate::buffer::{Allocation, DeviceBuffer, DeviceMemory, DeviceSlice};
use crate::device::Device;
use crate::error::{Error, Result};

/// Every piece begins at a multiple of this many bytes.
const ALIGNMENT: usize = 256;
/// The pool grows by at least this much.
const CHUNK_BYTES: usize = 2 << 20;

#[derive(Debug)]
struct Chunk {
    buffer: DeviceBuffer<u8>,
    used: usize,
}

#[derive(Debug, Default)]
struct State {
    chunks: Vec<Chunk>,
    frozen: bool,
}

/// Scratch memory handed out in order, see the module's description. Cheap to clone; all clones are one pool.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let pool = MemoryPool::new(&device);
/// let first = pool.alloc::<f32>(100)?.ptr();
/// pool.reset(); // what was given out may be given out again
/// assert_eq!(pool.alloc::<f32>(50)?.ptr(), first);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MemoryPool {
    device: Device,
    state: Arc<Mutex<State>>,
}

impl MemoryPool {
    /// An empty pool that grows as needed, outside captures.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            state: Arc::default(),
        }
    }

    /// A piece of `len` elements with unspecified content. It stays valid memory for its owner's life; after a
    /// [`MemoryPool::reset`] later pieces overlap it.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] if the pool is frozen and has too little left; [`Error::ForbiddenInCapture`] if it
    /// would have to grow during a capture; [`Error::Driver`].
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PoolSlice<T>> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(ALIGNMENT))
            .ok_or_else(|| Error::InvalidArgument {
                what: "pool allocation",
                why: format!("{len} elements of {} bytes overflow", size_of::<T>()),
            })?;
        let mut state = self.lock();
        let fits = |chunk: &Chunk| chunk.buffer.len() - chunk.used >= bytes;
        let index = match state.chunks.iter().position(fits) {
            Some(index) => index,
            None if state.frozen => {
                let capacity = state.chunks.iter().map(|chunk| chunk.buffer.len()).sum();
                let left = state
                    .chunks
                    .iter()
                    .map(|chunk| chunk.buffer.len() - chunk.used)
                    .max()
                    .unwrap_or(0);
                return Err(Error::PoolExhausted {
                    wanted: bytes,
                    left,
                    capacity,
                });
            }
            None => {
                let buffer = DeviceBuffer::zeroed(&self.device, bytes.max(CHUNK_BYTES))?;
                state.chunks.push(Chunk { buffer, used: 0 });
                state.chunks.len() - 1
            }
        };
        let chunk = &mut state.chunks[index];
        let offset = chunk.used;
        chunk.used += bytes;
        let allocation = chunk.buffer.as_slice().owner().clone();
        Ok(PoolSlice {
            allocation,
            offset,
            len,
            element: PhantomData,
        })
    }

    /// Starts over: the next pieces reuse the memory from the beginning.
    pub fn reset(&self) {
        for chunk in &mut self.lock().chunks {
            chunk.used = 0;
        }
    }

    /// Forbids growth from here on.
    pub fn freeze(&self) {
        self.lock().frozen = true;
    }

    /// Bytes of device memory it holds.
    pub fn capacity(&self) -> usize {
        self.lock().chunks.iter().map(|chunk| chunk.buffer.len()).sum()
    }

    /// Bytes handed out since the last reset.
    pub fn used(&self) -> usize {
        self.lock().chunks.iter().map(|chunk| chunk.used).sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of a [`MemoryPool`].
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let scratch = MemoryPool::new(&device).alloc::<f32>(100)?;
/// assert_eq!((scratch.len(), scratch.as_slice().byte_len()), (100, 400));
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct PoolSlice<T> {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
    element: PhantomData<fn(T) -> T>,
}

impl<T: Pod> PoolSlice<T> {
    /// The piece as a view.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice::whole(&self.allocation, self.offset, self.len)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device address of the first element.
    pub fn ptr(&self) -> u64 {
        self.as_slice().ptr()
    }
}

impl<'a, T: Pod> From<&'a PoolSlice<T>> for DeviceSlice<'a, T> {
    fn from(piece: &'a PoolSlice<T>) -> Self {
        piece.as_slice()
    }
}

impl<T: Pod> DeviceMemory for PoolSlice<T> {
    fn bytes(&self) -> DeviceSlice<'_, u8> {
        DeviceSlice::whole(&self.allocation, self.offset, self.len * size_of::<T>())
    }
}
