//! The kernels of this crate and their safe launches: the one module with `unsafe`.
#![allow(unsafe_code)]

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{DeviceSlice, Kernel, KernelSpec, LaunchConfig, Limits, Stream};
use half::bf16;

/// Copies that one launch makes at most; in step with the kernel.
pub(super) const MAX_COPIES: usize = 64;
const THREADS: u32 = 256;
/// Blocks that share a head in a checksum.
const CHECKSUM_BLOCKS: u32 = 64;
/// Heads that one launch covers at most (the grid's second dimension ends at 65,535).
const MAX_HEADS: usize = 65_535;

/// Every kernel of this crate, for compiling ahead and for tests without a GPU.
pub fn kernel_specs() -> Vec<KernelSpec> {
    vec![
        KernelSpec::new("pages", include_str!("../../kernels/pages.cu"))
            .entry("copy_pages", Limits::registers(32))
            .entry("checksum_pages", Limits::registers(40)),
    ]
}

/// A copy in 16-byte words.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PageMove {
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) words: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyParams {
    cache: u64,
    head_words: u64,
    page_words: u32,
    n_copies: u32,
    copies: [PageMove; MAX_COPIES],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ChecksumParams {
    cache: u64,
    sum: u64,
    head_words: u64,
    first: u64,
    words: u64,
}

/// The part of the cache that a launch works on: `heads * head_elements` elements.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    pub(super) cache: DeviceSlice<'a, bf16>,
    pub(super) heads: usize,
    /// Elements of all pages of a head: a multiple of 8.
    pub(super) head_elements: usize,
    /// Elements of a page of a head: a multiple of 8.
    pub(super) page_elements: usize,
}

impl Heads<'_> {
    fn is_consistent(&self) -> bool {
        self.head_elements.is_multiple_of(8)
            && self.page_elements.is_multiple_of(8)
            && self.page_elements > 0
            && self.cache.len() == self.heads * self.head_elements
            && u32::try_from(self.page_elements).is_ok()
            && self.heads > 0
    }
}

fn refuse(why: &str) -> cuda_graphs::Error {
    cuda_graphs::Error::InvalidArgument {
        what: "pages kernel",
        why: why.to_owned(),
    }
}

/// Makes at most [`MAX_COPIES`] copies in every head. Pages must be in range and no page both source and destination.
pub(super) fn copy_pages(
    kernel: &Kernel,
    stream: &Stream,
    heads: Heads<'_>,
    moves: &[PageMove],
) -> Result<(), cuda_graphs::Error> {
    let n_pages = heads.head_elements / heads.page_elements.max(1);
    let page_words = (heads.page_elements / 8) as u32;
    let in_range =
        |m: &PageMove| (m.src as usize) < n_pages && (m.dst as usize) < n_pages && m.words <= page_words;
    if !heads.is_consistent() || moves.len() > MAX_COPIES || !moves.iter().all(in_range) {
        return Err(refuse("copies outside the cache"));
    }
    if moves.is_empty() {
        return Ok(());
    }
    let mut copies = [PageMove::zeroed(); MAX_COPIES];
    copies[..moves.len()].copy_from_slice(moves);
    let mut first = 0;
    while first < heads.heads {
        let now = (heads.heads - first).min(MAX_HEADS);
        let params = CopyParams {
            cache: heads.cache.ptr() + (first * heads.head_elements * 2) as u64,
            head_words: (heads.head_elements / 8) as u64,
            page_words,
            n_copies: moves.len() as u32,
            copies,
        };
        let config = LaunchConfig::with_dimensions([moves.len() as u32, now as u32, 1], [THREADS, 1, 1]);
        // SAFETY: every page of a copy lies in the cache, which the slice covers: checked above. The cache's owner
        // keeps it for as long as the stream works on it.
        unsafe { kernel.launch(stream, &config, &params) }?;
        first += now;
    }
    Ok(())
}

/// Adds the hash of pages `first_page..first_page + pages` of every head to `sum`.
pub(super) fn checksum_pages(
    kernel: &Kernel,
    stream: &Stream,
    heads: Heads<'_>,
    first_page: usize,
    pages: usize,
    sum: DeviceSlice<'_, u64>,
) -> Result<(), cuda_graphs::Error> {
    let n_pages = heads.head_elements / heads.page_elements.max(1);
    if !heads.is_consistent() || first_page.saturating_add(pages) > n_pages || sum.len() != 1 {
        return Err(refuse("pages outside the cache"));
    }
    let mut first = 0;
    while first < heads.heads {
        let now = (heads.heads - first).min(MAX_HEADS);
        // The hash takes places within the launch's part; parts differ by their sizes alone, and are fixed for a cache.
        let params = ChecksumParams {
            cache: heads.cache.ptr() + (first * heads.head_elements * 2) as u64,
            sum: sum.ptr(),
            head_words: (heads.head_elements / 4) as u64,
            first: (first_page * heads.page_elements / 4) as u64,
            words: (pages * heads.page_elements / 4) as u64,
        };
        let config = LaunchConfig::with_dimensions([CHECKSUM_BLOCKS, now as u32, 1], [THREADS, 1, 1]);
        // SAFETY: the pages lie in the cache, which the slice covers, and `sum` has one element: checked above.
        unsafe { kernel.launch(stream, &config, &params) }?;
        first += now;
    }
    Ok(())
}
