//! Storage of keys and values in the memory of the CPU.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::{Error, KvDtype, KvLayout, PageCopy, PageId};

/// The keys and values of all layers, in the memory of the CPU.
///
/// It knows places, not sequences: a [`PageTable`](crate::PageTable) says which place holds which token.
///
/// ```
/// use paged_kv::{KvCache, KvDtype, KvLayout, KvSlice};
///
/// let layout = KvLayout { n_layers: 1, kv_heads: 2, head_dim: 1, n_pages: 2, page_size: 4, dtype: KvDtype::F32 };
/// let mut cache = KvCache::new(layout)?;
/// cache.write(0, &[5], &[1.0, 2.0], &[3.0, 4.0])?; // one token, to place 1 of page 1: [token, head, element]
/// let KvSlice::F32(keys) = cache.layer(0)?.k else { unreachable!() };
/// assert_eq!((keys[5], keys[8 + 5]), (1.0, 2.0)); // [head, place, element]
/// # Ok::<(), paged_kv::Error>(())
/// ```
pub struct KvCache {
    layout: KvLayout,
    /// `n_positions` and `head_stride` of the layout, which fit `usize` once the memory was taken.
    n_positions: usize,
    head_stride: usize,
    layers: Layers,
}

/// One layer's keys and values, read-only.
///
/// ```
/// use paged_kv::{KvCache, KvDtype, KvLayout};
///
/// let layout = KvLayout { n_layers: 1, kv_heads: 2, head_dim: 1, n_pages: 2, page_size: 4, dtype: KvDtype::F32 };
/// let mut cache = KvCache::new(layout)?;
/// cache.write(0, &[5], &[1.0, 2.0], &[3.0, 4.0])?;
/// let view = cache.layer(0)?;
/// assert_eq!(view.key(1, 5).map(|key| key.to_f32_vec()), Some(vec![2.0]));
/// assert_eq!(view.value(0, 5).map(|value| value.to_f32_vec()), Some(vec![3.0]));
/// assert!(view.key(0, 8).is_none(), "two pages of four places");
/// # Ok::<(), paged_kv::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct KvView<'a> {
    /// Shape of the cache; `k` and `v` are one layer of it.
    pub layout: KvLayout,
    /// Keys, `[kv_heads, n_pages * page_size, head_dim]`.
    pub k: KvSlice<'a>,
    /// Values, `[kv_heads, n_pages * page_size, head_dim]`.
    pub v: KvSlice<'a>,
}

/// Elements of a cache, of the type it was made with.
///
/// ```
/// use paged_kv::{KvDtype, KvSlice};
///
/// let keys = KvSlice::F32(&[1.0, 2.0]);
/// assert_eq!((keys.len(), keys.dtype(), keys.to_f32_vec()), (2, KvDtype::F32, vec![1.0, 2.0]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvSlice<'a> {
    /// bfloat16 elements.
    Bf16(&'a [bf16]),
    /// f32 elements.
    F32(&'a [f32]),
}

enum Layers {
    Bf16(Vec<Layer<bf16>>),
    F32(Vec<Layer<f32>>),
}

struct Layer<T> {
    k: Box<[T]>,
    v: Box<[T]>,
}

impl KvCache {
    /// A cache of zeros. The system is asked for zeroed memory and backs a page of it when it is first written.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] names a size of 0; [`Error::SizeOverflow`] comes before any memory is taken;
    /// [`Error::OutOfMemory`] if the system refuses, and what was taken is given back. Panics: none.
    pub fn new(layout: KvLayout) -> Result<Self, Error> {
        let bytes = layout.bytes()?;
        let overflow = Error::SizeOverflow { what: "KV cache" };
        // No allocation of Rust may pass isize::MAX bytes; the sum over the layers must fit as well.
        if isize::try_from(bytes).is_err() {
            return Err(overflow);
        }
        let to_usize = |n: u64| usize::try_from(n).map_err(|_| overflow.clone());
        let n_elements = to_usize(layout.elements_per_layer()?)?;
        let layers = match layout.dtype {
            KvDtype::Bf16 => Layers::Bf16(zeroed_layers(layout.n_layers, n_elements, bytes)?),
            KvDtype::F32 => Layers::F32(zeroed_layers(layout.n_layers, n_elements, bytes)?),
        };
        let n_positions = to_usize(layout.positions()?)?;
        let head_stride = to_usize(layout.head_stride()?)?;
        Ok(Self {
            layout,
            n_positions,
            head_stride,
            layers,
        })
    }

    /// The shape the cache was made with.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Stores the keys and values of `n` tokens of one layer.
    ///
    /// - `physical`, `[n]`: where each token goes, from
    ///   [`PageTable::write_positions`](crate::PageTable::write_positions); of a place given twice the last token stays;
    /// - `k`, `v`, `[n, kv_heads, head_dim]`: rounded to the nearest (ties to even) in a bf16 cache.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::WrongLength`], [`Error::NoSuchPosition`]; nothing is written then.
    /// Panics: none.
    pub fn write(&mut self, layer: usize, physical: &[usize], k: &[f32], v: &[f32]) -> Result<(), Error> {
        self.check_layer(layer)?;
        let KvLayout {
            kv_heads, head_dim, ..
        } = self.layout;
        let expected = physical.len().saturating_mul(kv_heads * head_dim);
        for (what, actual) in [("k", k.len()), ("v", v.len())] {
            if actual != expected {
                return Err(Error::WrongLength {
                    what,
                    actual,
                    expected,
                });
            }
        }
        let n_positions = self.n_positions;
        if let Some(&position) = physical.iter().find(|&&position| position >= n_positions) {
            return Err(Error::NoSuchPosition {
                position,
                n_positions,
            });
        }
        let head_stride = self.head_stride;
        match &mut self.layers {
            Layers::Bf16(layers) => {
                let Layer { k: to_k, v: to_v } = &mut layers[layer];
                scatter(to_k, k, physical, head_stride, head_dim, |to, from| {
                    to.convert_from_f32_slice(from)
                });
                scatter(to_v, v, physical, head_stride, head_dim, |to, from| {
                    to.convert_from_f32_slice(from)
                });
            }
            Layers::F32(layers) => {
                let Layer { k: to_k, v: to_v } = &mut layers[layer];
                scatter(to_k, k, physical, head_stride, head_dim, |to, from| {
                    to.copy_from_slice(from)
                });
                scatter(to_v, v, physical, head_stride, head_dim, |to, from| {
                    to.copy_from_slice(from)
                });
            }
        }
        Ok(())
    }

    /// One layer's keys and values.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`]. Panics: none.
    pub fn layer(&self, layer: usize) -> Result<KvView<'_>, Error> {
        self.check_layer(layer)?;
        let (k, v) = match &self.layers {
            Layers::Bf16(layers) => (KvSlice::Bf16(&layers[layer].k), KvSlice::Bf16(&layers[layer].v)),
            Layers::F32(layers) => (KvSlice::F32(&layers[layer].k), KvSlice::F32(&layers[layer].v)),
        };
        Ok(KvView {
            layout: self.layout,
            k,
            v,
        })
    }

    /// Makes the copies that [`PageTable::reserve`](crate::PageTable::reserve) returned, one after the other, in
    /// every layer.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`], [`Error::CopyTooLong`]; no copy is made then. Panics: none.
    pub fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Error> {
        for copy in copies {
            self.check_page(copy.src)?;
            self.check_page(copy.dst)?;
            if copy.tokens > self.layout.page_size {
                let page_size = self.layout.page_size;
                return Err(Error::CopyTooLong {
                    tokens: copy.tokens,
                    page_size,
                });
            }
        }
        let page = self.layout.page_size * self.layout.head_dim;
        for copy in copies {
            let (src, dst) = (copy.src.index() * page, copy.dst.index() * page);
            let n = copy.tokens * self.layout.head_dim;
            self.for_each_head(
                |head| head.copy_within(src..src + n, dst),
                |head| head.copy_within(src..src + n, dst),
            );
        }
        Ok(())
    }

    /// Sets every element of every layer, page 0 included. Panics: none.
    pub fn fill(&mut self, value: f32) {
        self.for_each_head(|head| head.fill(bf16::from_f32(value)), |head| head.fill(value));
    }

    /// Sets every element of one page in every layer; with NaN, a test that nothing reads the page.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`]. Panics: none.
    pub fn fill_page(&mut self, page: PageId, value: f32) -> Result<(), Error> {
        self.check_page(page)?;
        let n = self.layout.page_size * self.layout.head_dim;
        let start = page.index() * n;
        self.for_each_head(
            |head| head[start..start + n].fill(bf16::from_f32(value)),
            |head| head[start..start + n].fill(value),
        );
        Ok(())
    }

    fn check_layer(&self, layer: usize) -> Result<(), Error> {
        let n_layers = self.layout.n_layers;
        if layer < n_layers {
            Ok(())
        } else {
            Err(Error::NoSuchLayer { layer, n_layers })
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

    /// Applies one of the two to every head of every layer, `[n_pages * page_size, head_dim]`.
    fn for_each_head(&mut self, on_bf16: impl Fn(&mut [bf16]), on_f32: impl Fn(&mut [f32])) {
        let head_stride = self.head_stride;
        match &mut self.layers {
            Layers::Bf16(layers) => {
                for layer in layers {
                    layer.k.chunks_exact_mut(head_stride).for_each(&on_bf16);
                    layer.v.chunks_exact_mut(head_stride).for_each(&on_bf16);
                }
            }
            Layers::F32(layers) => {
                for layer in layers {
                    layer.k.chunks_exact_mut(head_stride).for_each(&on_f32);
                    layer.v.chunks_exact_mut(head_stride).for_each(&on_f32);
                }
            }
        }
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvCache")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl<'a> KvView<'a> {
    /// The key of one head at one place, `[head_dim]`. `None` outside the layer. Panics: none.
    pub fn key(&self, kv_head: usize, position: usize) -> Option<KvSlice<'a>> {
        self.row(self.k, kv_head, position)
    }

    /// The value of one head at one place, `[head_dim]`. `None` outside the layer. Panics: none.
    pub fn value(&self, kv_head: usize, position: usize) -> Option<KvSlice<'a>> {
        self.row(self.v, kv_head, position)
    }

    fn row(&self, elements: KvSlice<'a>, kv_head: usize, position: usize) -> Option<KvSlice<'a>> {
        let start = usize::try_from(self.layout.offset(kv_head, position)?).ok()?;
        let end = start.checked_add(self.layout.head_dim)?;
        Some(match elements {
            KvSlice::Bf16(all) => KvSlice::Bf16(all.get(start..end)?),
            KvSlice::F32(all) => KvSlice::F32(all.get(start..end)?),
        })
    }
}

impl KvSlice<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            KvSlice::Bf16(elements) => elements.len(),
            KvSlice::F32(elements) => elements.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> KvDtype {
        match self {
            KvSlice::Bf16(_) => KvDtype::Bf16,
            KvSlice::F32(_) => KvDtype::F32,
        }
    }

    /// The elements as f32, exactly.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self {
            KvSlice::Bf16(elements) => elements.to_f32_vec(),
            KvSlice::F32(elements) => elements.to_vec(),
        }
    }
}

fn zeroed_layers<T: bytemuck::Zeroable>(
    n_layers: usize,
    n_elements: usize,
    bytes: u64,
) -> Result<Vec<Layer<T>>, Error> {
    let out_of_memory = || Error::OutOfMemory {
        what: "KV cache",
        bytes,
    };
    let zeroed = || bytemuck::allocation::try_zeroed_slice_box(n_elements).map_err(|()| out_of_memory());
    let mut layers = Vec::new();
    layers.try_reserve_exact(n_layers).map_err(|_| out_of_memory())?;
    for _ in 0..n_layers {
        layers.push(Layer {
            k: zeroed()?,
            v: zeroed()?,
        });
    }
    Ok(layers)
}

/// `from`, `[n, kv_heads, head_dim]`, to `to`, `[kv_heads, n_pages * page_size, head_dim]`.
fn scatter<T>(
    to: &mut [T],
    from: &[f32],
    physical: &[usize],
    head_stride: usize,
    head_dim: usize,
    store: impl Fn(&mut [T], &[f32]),
) {
    let token = to.len() / head_stride * head_dim;
    for (&position, token) in physical.iter().zip(from.chunks_exact(token)) {
        let start = position * head_dim;
        for (head, row) in to.chunks_exact_mut(head_stride).zip(token.chunks_exact(head_dim)) {
            store(&mut head[start..start + head_dim], row);
        }
    }
}
