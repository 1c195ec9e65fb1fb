//! K and V of every layer in one allocation on the device.

use std::ops::Range;
use std::sync::Arc;

use cuda_graphs::{Compiler, Device, DeviceBuffer, DeviceSlice, Kernel, Stream};
use half::bf16;

use super::CudaError;
use super::launch::{Heads, MAX_COPIES, PageMove, checksum_pages, copy_pages, kernel_specs};
use crate::{Error, KvDtype, KvLayout, PageCopy, PageId};

/// A paged KV cache in device memory, laid out as [`KvLayout`] says, at an address that never changes.
///
/// ```no_run
/// # use cuda_graphs::{Compiler, Device, Stream};
/// # use paged_kv::{KvDtype, KvLayout, PageTable, PageTableConfig};
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// use paged_kv::cuda::CudaKvCache;
///
/// let layout = KvLayout { n_layers: 2, kv_heads: 2, head_dim: 64, n_pages: 9, page_size: 16, dtype: KvDtype::Bf16 };
/// let cache = CudaKvCache::new(&device, &Compiler::new()?, layout)?;
/// assert_eq!(cache.keys(0)?.len() as u64, layout.elements_per_layer()?);
/// let before = cache.checksum(&stream, 1..9)?; // of every page but 0
/// assert_eq!(cache.checksum(&stream, 1..9)?, before);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CudaKvCache {
    layout: KvLayout,
    /// `[n_layers, 2 (K, V), kv_heads, n_pages * page_size, head_dim]`.
    elements: Arc<DeviceBuffer<bf16>>,
    /// Elements of one layer's K.
    half_layer: usize,
    head_elements: usize,
    copy: Kernel,
    checksum: Kernel,
    sum: DeviceBuffer<u64>,
}

impl CudaKvCache {
    /// A cache of zeros. Compiles this crate's kernels, or takes them from the compiler's cache.
    ///
    /// # Errors
    /// [`CudaError::UnsupportedDtype`] unless the layout says bf16, [`CudaError::UnsupportedHeadDim`],
    /// [`CudaError::Cache`] for a layout that makes no sense, [`CudaError::Cuda`] (out of memory among others).
    /// Panics: none.
    pub fn new(device: &Device, compiler: &Compiler, layout: KvLayout) -> Result<Self, CudaError> {
        if layout.dtype != KvDtype::Bf16 {
            return Err(CudaError::UnsupportedDtype { dtype: layout.dtype });
        }
        if !layout.head_dim.is_multiple_of(8) {
            return Err(CudaError::UnsupportedHeadDim {
                head_dim: layout.head_dim,
            });
        }
        layout.check()?;
        let size = |value: u64| usize::try_from(value).map_err(|_| Error::SizeOverflow { what: "KV cache" });
        let half_layer = size(layout.elements_per_layer()?)?;
        let head_elements = size(layout.head_stride()?)?;
        let all = half_layer
            .checked_mul(2 * layout.n_layers)
            .ok_or(Error::SizeOverflow { what: "KV cache" })?;
        let modules = compiler.load_all(device, &kernel_specs())?;
        let kernel = |name: &str| {
            let found = modules.iter().find_map(|module| module.kernel(name).ok());
            found.ok_or_else(|| cuda_graphs::Error::InvalidArgument {
                what: "kernel",
                why: format!("{name} is in no module of paged-kv"),
            })
        };
        Ok(CudaKvCache {
            layout,
            elements: Arc::new(DeviceBuffer::zeroed(device, all)?),
            half_layer,
            head_elements,
            copy: kernel("copy_pages")?,
            checksum: kernel("checksum_pages")?,
            sum: DeviceBuffer::zeroed(device, 1)?,
        })
    }

    /// Shapes and sizes.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Keys of a layer, `[kv_heads, n_pages * page_size, head_dim]`.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`]. Panics: none.
    pub fn keys(&self, layer: usize) -> Result<DeviceSlice<'_, bf16>, CudaError> {
        self.half(layer, 0)
    }

    /// Values of a layer, `[kv_heads, n_pages * page_size, head_dim]`.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`]. Panics: none.
    pub fn values(&self, layer: usize) -> Result<DeviceSlice<'_, bf16>, CudaError> {
        self.half(layer, 1)
    }

    /// Makes the copies that [`PageTable::reserve`](crate::PageTable::reserve) returned, one after the other, in every
    /// layer; does not wait. Copies that do not depend on each other run together.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`], [`Error::CopyTooLong`]: no copy is made then. [`CudaError::Cuda`]. Panics: none.
    pub fn copy_pages(&self, stream: &Stream, copies: &[PageCopy]) -> Result<(), CudaError> {
        let page_size = self.layout.page_size;
        for copy in copies {
            self.check_page(copy.src)?;
            self.check_page(copy.dst)?;
            if copy.tokens > page_size {
                return Err(Error::CopyTooLong {
                    tokens: copy.tokens,
                    page_size,
                }
                .into());
            }
        }
        stream.keep(&self.elements);
        let mut moves: Vec<PageMove> = Vec::new();
        for copy in copies {
            let next = PageMove {
                src: copy.src.index() as u32,
                dst: copy.dst.index() as u32,
                words: (copy.tokens * self.layout.head_dim / 8) as u32,
            };
            if next.src == next.dst || next.words == 0 {
                continue;
            }
            let depends = |m: &PageMove| m.dst == next.src || m.dst == next.dst || m.src == next.dst;
            if moves.len() == MAX_COPIES || moves.iter().any(depends) {
                copy_pages(&self.copy, stream, self.heads(), &moves)?;
                moves.clear();
            }
            moves.push(next);
        }
        Ok(copy_pages(&self.copy, stream, self.heads(), &moves)?)
    }

    /// A hash of the pages `pages`, in all layers, K and V, of where each element lies and its bits. Waits. With
    /// `1..n_pages` a test that padded rows changed no real page.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range ends past the pool, [`CudaError::Cuda`]. Panics: none.
    pub fn checksum(&self, stream: &Stream, pages: Range<usize>) -> Result<u64, CudaError> {
        let n_pages = self.layout.n_pages;
        if pages.end > n_pages || pages.start > pages.end {
            let (value, max) = (pages.end.max(pages.start) as u64, n_pages as u64);
            return Err(Error::OutOfRange {
                field: "pages",
                value,
                min: 0,
                max,
            }
            .into());
        }
        stream.fill_bytes(&self.sum, 0)?;
        checksum_pages(
            &self.checksum,
            stream,
            self.heads(),
            pages.start,
            pages.len(),
            self.sum.as_slice(),
        )?;
        Ok(stream.download(&self.sum)?[0])
    }

    /// Sets every byte of the cache to `byte`; `0xff` makes every element a NaN. Does not wait.
    ///
    /// # Errors
    /// [`CudaError::Cuda`]. Panics: none.
    pub fn fill_bytes(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        Ok(stream.fill_bytes(&*self.elements, byte)?)
    }

    /// Sets every byte of one page, in all layers and heads. Does not wait.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`], [`CudaError::Cuda`]. Panics: none.
    pub fn fill_page_bytes(&self, stream: &Stream, page: PageId, byte: u8) -> Result<(), CudaError> {
        self.check_page(page)?;
        let n = self.layout.page_size * self.layout.head_dim;
        for head in 0..2 * self.layout.n_layers * self.layout.kv_heads {
            let start = head * self.head_elements + page.index() * n;
            stream.fill_bytes(self.elements.slice(start..start + n)?, byte)?;
        }
        Ok(())
    }

    /// Replaces a layer's K and V, both `[kv_heads, n_pages * page_size, head_dim]`. Waits; for tests and for loading.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::WrongLength`], [`CudaError::Cuda`]. Panics: none.
    pub fn upload_layer(
        &self,
        stream: &Stream,
        layer: usize,
        k: &[bf16],
        v: &[bf16],
    ) -> Result<(), CudaError> {
        for (what, given) in [("k", k), ("v", v)] {
            if given.len() != self.half_layer {
                let (actual, expected) = (given.len(), self.half_layer);
                return Err(Error::WrongLength {
                    what,
                    actual,
                    expected,
                }
                .into());
            }
        }
        stream.upload(self.keys(layer)?, k)?;
        Ok(stream.upload(self.values(layer)?, v)?)
    }

    /// A layer's K and V on the host. Waits.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`CudaError::Cuda`]. Panics: none.
    pub fn download_layer(&self, stream: &Stream, layer: usize) -> Result<(Vec<bf16>, Vec<bf16>), CudaError> {
        Ok((
            stream.download(self.keys(layer)?)?,
            stream.download(self.values(layer)?)?,
        ))
    }

    fn half(&self, layer: usize, which: usize) -> Result<DeviceSlice<'_, bf16>, CudaError> {
        let n_layers = self.layout.n_layers;
        if layer >= n_layers {
            return Err(Error::NoSuchLayer { layer, n_layers }.into());
        }
        let start = (2 * layer + which) * self.half_layer;
        Ok(self.elements.slice(start..start + self.half_layer)?)
    }

    fn heads(&self) -> Heads<'_> {
        Heads {
            cache: self.elements.as_slice(),
            heads: 2 * self.layout.n_layers * self.layout.kv_heads,
            head_elements: self.head_elements,
            page_elements: self.layout.page_size * self.layout.head_dim,
        }
    }

    fn check_page(&self, page: PageId) -> Result<(), Error> {
        let n_pages = self.layout.n_pages;
        if page.index() < n_pages {
            Ok(())
        } else {
            Err(Error::NoSuchPage { page, n_pages })
        }
    }
}

impl std::fmt::Debug for CudaKvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaKvCache")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
