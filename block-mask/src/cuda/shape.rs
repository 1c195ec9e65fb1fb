//! Sizes of model and cache that a kernel is made for.

use super::CudaError;

/// Sizes of model and cache that a kernel is made for.
///
/// ```
/// use block_mask::cuda::AttentionShape;
///
/// let shape = AttentionShape { heads: 32, kv_heads: 8, head_dim: 128, page_size: 64, n_pages: 513 };
/// assert_eq!(shape.group(), 4, "query heads share a K/V head");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv_heads`; at most 16 for each KV head.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Tokens of a page: 16, 32, 64, 128 or 256.
    pub page_size: usize,
    /// Pages of the cache, page 0 included.
    pub n_pages: usize,
}

impl AttentionShape {
    /// Query heads that share a KV head; 0 without KV heads.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    pub(crate) fn page_shift(&self) -> i32 {
        self.page_size.trailing_zeros() as i32
    }

    /// Elements of one layer's K or V.
    pub(crate) fn cache_len(&self) -> usize {
        self.kv_heads * self.head_stride()
    }

    /// Elements between KV heads.
    pub(crate) fn head_stride(&self) -> usize {
        self.n_pages * self.page_size * self.head_dim
    }

    /// 1 / √head_dim.
    pub(crate) fn default_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    pub(crate) fn check(&self) -> Result<(), CudaError> {
        let refuse = |what, value, allowed| Err(CudaError::Unsupported { what, value, allowed });
        if ![64, 128].contains(&self.head_dim) {
            return refuse("head_dim", self.head_dim, "64 and 128 are possible");
        }
        if !self.page_size.is_power_of_two() || !(16..=256).contains(&self.page_size) {
            return refuse(
                "the page size",
                self.page_size,
                "16, 32, 64, 128 and 256 are possible",
            );
        }
        if self.kv_heads == 0 || self.kv_heads > 65_535 {
            return refuse(
                "the number of KV heads",
                self.kv_heads,
                "1 to 65,535 are possible",
            );
        }
        if self.heads > 65_535
            || !self.heads.is_multiple_of(self.kv_heads)
            || !(1..=16).contains(&self.group())
        {
            return refuse(
                "the number of heads",
                self.heads,
                "1 to 16 for each KV head are possible",
            );
        }
        if self.n_pages == 0 || self.n_pages > i32::MAX as usize / self.page_size {
            return refuse(
                "the number of pages",
                self.n_pages,
                "1 to 2³¹ tokens in all are possible",
            );
        }
        Ok(())
    }
}

/// The scale to use: finite and positive, since a row's maximum is taken before it is scaled.
pub(crate) fn check_scale(scale: f32) -> Result<f32, CudaError> {
    if scale.is_finite() && scale > 0.0 {
        Ok(scale)
    } else {
        let why = format!("the scale is {scale}, it must be positive and finite");
        Err(CudaError::OptionRefused { option: "scale", why })
    }
}
