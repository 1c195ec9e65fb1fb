//! Shapes, strides and bytes of a KV cache: a pure value, computed in 64 bits.

use std::fmt;

use crate::Error;

/// Element type of a KV cache.
///
/// ```
/// use paged_kv::KvDtype;
///
/// assert_eq!((KvDtype::Bf16.bytes(), KvDtype::F32.to_string().as_str()), (2, "f32"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE 754 single precision, 4 bytes.
    F32,
}

impl KvDtype {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvDtype::Bf16 => "bf16",
            KvDtype::F32 => "f32",
        })
    }
}

/// Shape of a KV cache: per layer one contiguous K and one V of `[kv_heads, n_pages * page_size, head_dim]`.
///
/// ```text
///            position 0                          position n_pages * page_size - 1
/// head 0     [head_dim][head_dim]...             [head_dim]     <- page_size of these make a page
/// head 1     [head_dim][head_dim]...             [head_dim]
/// ...                                                              element (h, p, d) at
/// head H-1   [head_dim][head_dim]...             [head_dim]        (h * n_pages * page_size + p) * head_dim + d
/// ```
///
/// The sizes are plain numbers that anyone may set; the methods check them and compute in 64 bits, so that no
/// product wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Layers of the model.
    pub n_layers: usize,
    /// Heads of K and V in a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Pages of the pool, page 0 included: that of the [`PageTable`](crate::PageTable).
    pub n_pages: usize,
    /// Tokens in a page: that of the [`PageTable`](crate::PageTable).
    pub page_size: usize,
    /// Element type of K and V.
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Whether every size is at least 1 and the whole fits 64 bits.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] names a size of 0; [`Error::SizeOverflow`]. Panics: none.
    pub fn check(&self) -> Result<(), Error> {
        self.bytes().map(drop)
    }

    /// Positions of a layer: `n_pages * page_size`.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Panics: none.
    pub fn positions(&self) -> Result<u64, Error> {
        self.product(&[self.n_pages, self.page_size])
    }

    /// Elements between the starts of two heads: `n_pages * page_size * head_dim`.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Panics: none.
    pub fn head_stride(&self) -> Result<u64, Error> {
        self.product(&[self.n_pages, self.page_size, self.head_dim])
    }

    /// Elements of one layer's K, and of its V: `kv_heads * n_pages * page_size * head_dim`.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Panics: none.
    pub fn elements_per_layer(&self) -> Result<u64, Error> {
        self.product(&[self.kv_heads, self.n_pages, self.page_size, self.head_dim])
    }

    /// Bytes that one token takes in all layers, K and V together.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Panics: none.
    pub fn bytes_per_token(&self) -> Result<u64, Error> {
        self.product(&[2, self.n_layers, self.kv_heads, self.head_dim, self.dtype.bytes()])
    }

    /// Bytes that one page takes in all layers, K and V together.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Panics: none.
    pub fn bytes_per_page(&self) -> Result<u64, Error> {
        self.product(&[
            2,
            self.n_layers,
            self.kv_heads,
            self.page_size,
            self.head_dim,
            self.dtype.bytes(),
        ])
    }

    /// Bytes of the whole cache.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Panics: none.
    pub fn bytes(&self) -> Result<u64, Error> {
        let positions = [self.n_pages, self.page_size];
        self.product(&[
            2,
            self.n_layers,
            self.kv_heads,
            positions[0],
            positions[1],
            self.head_dim,
            self.dtype.bytes(),
        ])
    }

    /// Element offset of `(kv_head, position, 0)` in a layer's K or V. `None` outside the layout. Panics: none.
    pub fn offset(&self, kv_head: usize, position: usize) -> Option<u64> {
        let positions = self.positions().ok()?;
        let (kv_head, position) = (kv_head as u64, position as u64);
        if kv_head >= self.kv_heads as u64 || position >= positions {
            return None;
        }
        kv_head
            .checked_mul(positions)?
            .checked_add(position)?
            .checked_mul(self.head_dim as u64)
    }

    fn product(&self, factors: &[usize]) -> Result<u64, Error> {
        let sizes = [
            ("n_layers", self.n_layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("n_pages", self.n_pages),
            ("page_size", self.page_size),
        ];
        for (field, value) in sizes {
            if value == 0 {
                return Err(Error::OutOfRange {
                    field,
                    value: 0,
                    min: 1,
                    max: u64::MAX,
                });
            }
        }
        factors
            .iter()
            .try_fold(1_u64, |product, &factor| product.checked_mul(factor as u64))
            .ok_or(Error::SizeOverflow { what: "KV cache" })
    }
}
