//! Attention under a block mask on the CPU.

mod plan;
mod simd;
mod tile;
mod touch;

use paged_kv::{KvSlice, KvView};

use crate::error::{Error, Result};
use crate::expr::{Axis, Domain};
use crate::mask::{BlockMask, Logical, Physical, Space};
use crate::score_mod::ScoreMod;

use plan::Problem;

/// Queries, f32, wherever they lie.
///
/// ```
/// use block_mask::QueryView;
///
/// let data = vec![0.0; 3 * 2 * 8];
/// let packed = QueryView::packed(&data, 3, 2, 8)?; // three tokens of two heads
/// assert_eq!((packed.output_len(), packed.lse_len()), (48, 6));
/// assert!(QueryView::packed(&data, 4, 2, 8).is_err(), "there are three");
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QueryView<'a> {
    data: &'a [f32],
    batch: usize,
    len: usize,
    heads: usize,
    head_dim: usize,
    batch_stride: usize,
    row_stride: usize,
    head_stride: usize,
}

impl<'a> QueryView<'a> {
    /// Queries of a packed axis, `[rows, heads, head_dim]`. The output is laid out in the same way and the log-sum-exp as
    /// `[rows, heads]`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::SliceTooShort`].
    pub fn packed(data: &'a [f32], rows: usize, heads: usize, head_dim: usize) -> Result<QueryView<'a>> {
        QueryView::with_strides(
            data,
            [1, rows, heads, head_dim],
            [0, heads.saturating_mul(head_dim), head_dim],
        )
    }

    /// Queries `[batch, heads, len, head_dim]`. The output is laid out in the same way and the log-sum-exp as
    /// `[batch, heads, len]`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::SliceTooShort`].
    pub fn batched(
        data: &'a [f32],
        batch: usize,
        heads: usize,
        len: usize,
        head_dim: usize,
    ) -> Result<QueryView<'a>> {
        let head_stride = len.saturating_mul(head_dim);
        let strides = [heads.saturating_mul(head_stride), head_dim, head_stride];
        QueryView::with_strides(data, [batch, len, heads, head_dim], strides)
    }

    /// Queries at `data[b · strides[0] + row · strides[1] + head · strides[2] + d]` for `extents` `[batch, rows, heads,
    /// head_dim]`, so that they can be a part of a wider tensor. The output is contiguous, as for
    /// [`packed`](Self::packed) or [`batched`](Self::batched), whichever the mask calls for.
    ///
    /// # Errors
    /// [`Error::Zero`] for a batch, head count or head size of 0, [`Error::SliceTooShort`].
    pub fn with_strides(data: &'a [f32], extents: [usize; 4], strides: [usize; 3]) -> Result<QueryView<'a>> {
        let [batch, len, heads, head_dim] = extents;
        for (what, value) in [
            ("the batch size", batch),
            ("the number of heads", heads),
            ("the head size", head_dim),
        ] {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        if len > 0 {
            let last = [
                (batch - 1, strides[0]),
                (len - 1, strides[1]),
                (heads - 1, strides[2]),
            ];
            let needed = last.iter().fold(head_dim, |sum, &(index, stride)| {
                sum.saturating_add(index.saturating_mul(stride))
            });
            if needed > data.len() {
                return Err(Error::SliceTooShort {
                    what: "the query tensor",
                    needed,
                    found: data.len(),
                });
            }
        }
        let [batch_stride, row_stride, head_stride] = strides;
        Ok(QueryView {
            data,
            batch,
            len,
            heads,
            head_dim,
            batch_stride,
            row_stride,
            head_stride,
        })
    }

    /// Elements of the output.
    pub fn output_len(&self) -> usize {
        self.lse_len().saturating_mul(self.head_dim)
    }

    /// Elements of the log-sum-exp.
    pub fn lse_len(&self) -> usize {
        self.batch.saturating_mul(self.len).saturating_mul(self.heads)
    }

    fn row(&self, b: usize, row: usize, head: usize) -> &'a [f32] {
        let start = b * self.batch_stride + row * self.row_stride + head * self.head_stride;
        &self.data[start..start + self.head_dim]
    }
}

/// Keys and values that are not paged, `[batch, kv_heads, len, head_dim]`.
///
/// ```
/// use block_mask::{BlockMask, ContiguousKv, FlexOptions, MaskMod, MaskShape, QueryView, flex_attention_contiguous};
/// use paged_kv::KvSlice;
///
/// // One query that sees two keys alike: the mean of their values.
/// let (q, k, v) = ([1.0, 0.0], [0.5, 0.0, 0.5, 0.0], [1.0, 2.0, 3.0, 4.0]);
/// let kv = ContiguousKv { k: KvSlice::F32(&k), v: KvSlice::F32(&v), batch: 1, kv_heads: 1, len: 2, head_dim: 2 };
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 1, 2), MaskMod::all())?;
/// let mut out = [0.0; 2];
/// let queries = QueryView::batched(&q, 1, 1, 1, 2)?;
/// flex_attention_contiguous(queries, kv, &mask, None, &FlexOptions::default(), &mut out, None)?;
/// assert_eq!(out, [2.0, 3.0]);
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ContiguousKv<'a> {
    /// Keys.
    pub k: KvSlice<'a>,
    /// Values.
    pub v: KvSlice<'a>,
    /// Batch rows.
    pub batch: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Keys of a batch row.
    pub len: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Options of [`flex_attention`].
///
/// ```
/// use block_mask::FlexOptions;
///
/// assert_eq!(FlexOptions::default().scale, None, "1 / √head_dim");
/// assert_eq!(FlexOptions::default().with_scale(0.25).scale, Some(0.25));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct FlexOptions {
    /// What `q·k` is multiplied by; 1/√head_dim if `None`.
    pub scale: Option<f32>,
}

impl FlexOptions {
    /// The options with another scale.
    #[must_use]
    pub fn with_scale(mut self, scale: f32) -> FlexOptions {
        self.scale = Some(scale);
        self
    }
}

/// `softmax(score_mod(scale · q·k)) · v` over a paged cache, under `mask`. Sums are f32.
///
/// - `q`: for a packed mask [`QueryView::packed`] with at least [`BlockMask::query_rows`] rows, else
///   [`QueryView::batched`] with the mask's batch and query count. The query heads are shared out over the cache's KV
///   heads in order (grouped-query attention).
/// - `kv`: one layer of a cache with the page size of the mask.
/// - `out`: overwritten, in the layout of `q`; `lse`: the natural logarithm of the softmax's denominator, likewise.
///
/// A query without an allowed key gives 0 and −∞; so do rows of a packed axis that belong to no sequence. Masked keys
/// and values are not summed, whatever they hold, NaN included. The result depends neither on the placement of pages and
/// slots nor on the number of threads, bit for bit.
///
/// # Errors
/// [`Error::Mismatch`], [`Error::PageSize`], [`Error::PageOutOfRange`], [`Error::HeadGroups`], [`Error::SliceTooShort`]
/// for shapes that do not fit each other; [`Error::Broadcast`] when a function of the mask reads the head but the mask has
/// lists for one; [`Error::Scale`]; the errors of [`ScoreMod::check`]. Nothing has been written then. Panics: none.
pub fn flex_attention(
    q: QueryView<'_>,
    kv: KvView<'_>,
    mask: &BlockMask<Physical>,
    score_mod: Option<&ScoreMod>,
    options: &FlexOptions,
    out: &mut [f32],
    lse: Option<&mut [f32]>,
) -> Result<()> {
    let layout = &kv.layout;
    if layout.page_size != mask.shape().block_kv {
        return Err(Error::PageSize {
            block_kv: mask.shape().block_kv,
            page_size: layout.page_size,
        });
    }
    if let Some(page) = mask.largest_page()
        && page >= layout.n_pages
    {
        return Err(Error::PageOutOfRange {
            page,
            n_pages: layout.n_pages,
        });
    }
    if mask.is_packed() {
        if q.batch != 1 {
            return Err(Error::Mismatch {
                what: "batch size of packed queries",
                expected: 1,
                found: q.batch,
            });
        }
        if mask.query_rows() > q.len {
            return Err(Error::Mismatch {
                what: "rows of packed queries",
                expected: mask.query_rows(),
                found: q.len,
            });
        }
    }
    let too_large = Error::TooLarge {
        what: "the KV cache",
        value: usize::MAX,
        max: isize::MAX as usize,
    };
    let head_stride = layout
        .head_stride()
        .ok()
        .and_then(|stride| usize::try_from(stride).ok())
        .ok_or(too_large)?;
    let keys = layout.n_pages.saturating_mul(layout.page_size);
    let source = Source {
        k: kv.k,
        v: kv.v,
        batch_stride: 0,
        head_stride,
    };
    run(
        q,
        source,
        layout.kv_heads,
        layout.head_dim,
        1,
        keys,
        mask,
        mask.is_packed(),
        score_mod,
        options,
        out,
        lse,
    )
}

/// As [`flex_attention`], over keys and values that are not paged. A mask for one batch row serves every batch row.
///
/// # Errors
/// As [`flex_attention`]; [`Error::Broadcast`] also when a function reads the batch row but the mask has lists for one.
pub fn flex_attention_contiguous(
    q: QueryView<'_>,
    kv: ContiguousKv<'_>,
    mask: &BlockMask<Logical>,
    score_mod: Option<&ScoreMod>,
    options: &FlexOptions,
    out: &mut [f32],
    lse: Option<&mut [f32]>,
) -> Result<()> {
    for (what, expected, found) in [
        ("batch size of the keys", q.batch, kv.batch),
        ("number of keys", mask.shape().kv_len, kv.len),
    ] {
        if expected != found {
            return Err(Error::Mismatch {
                what,
                expected,
                found,
            });
        }
    }
    let head_stride = kv.len.saturating_mul(kv.head_dim);
    let batch_stride = kv.kv_heads.saturating_mul(head_stride);
    let source = Source {
        k: kv.k,
        v: kv.v,
        batch_stride,
        head_stride,
    };
    run(
        q,
        source,
        kv.kv_heads,
        kv.head_dim,
        kv.batch,
        kv.len,
        mask,
        false,
        score_mod,
        options,
        out,
        lse,
    )
}

/// Where keys and values lie: token `t` of head `h` of batch row `b` starts at
/// `b · batch_stride + h · head_stride + t · head_dim`.
#[derive(Clone, Copy)]
struct Source<'a> {
    k: KvSlice<'a>,
    v: KvSlice<'a>,
    batch_stride: usize,
    head_stride: usize,
}

fn run<S: Space>(
    q: QueryView<'_>,
    source: Source<'_>,
    kv_heads: usize,
    head_dim: usize,
    kv_batch: usize,
    keys: usize,
    mask: &BlockMask<S>,
    packed: bool,
    score_mod: Option<&ScoreMod>,
    options: &FlexOptions,
    out: &mut [f32],
    lse: Option<&mut [f32]>,
) -> Result<()> {
    let shape = mask.shape();
    if head_dim != q.head_dim {
        return Err(Error::Mismatch {
            what: "head size of the keys",
            expected: q.head_dim,
            found: head_dim,
        });
    }
    if kv_heads == 0 || !q.heads.is_multiple_of(kv_heads) {
        return Err(Error::HeadGroups {
            query_heads: q.heads,
            kv_heads,
        });
    }
    let per_batch = kv_heads.saturating_mul(keys).saturating_mul(head_dim);
    let needed = kv_batch.saturating_mul(per_batch);
    for (what, found) in [
        ("the key tensor", source.k.len()),
        ("the value tensor", source.v.len()),
    ] {
        if found < needed {
            return Err(Error::SliceTooShort { what, needed, found });
        }
    }
    if !packed {
        let broadcast = shape.batch == 1 && std::any::TypeId::of::<S>() == std::any::TypeId::of::<Logical>();
        if shape.batch != q.batch && !broadcast {
            return Err(Error::Mismatch {
                what: "batch size of the queries",
                expected: shape.batch,
                found: q.batch,
            });
        }
        if broadcast && q.batch > 1 && mask.mask_mod().depends_on(Axis::Batch) {
            return Err(Error::Broadcast {
                axis: Axis::Batch,
                wanted: q.batch,
            });
        }
        if shape.q_len != q.len {
            return Err(Error::Mismatch {
                what: "number of queries",
                expected: shape.q_len,
                found: q.len,
            });
        }
    }
    if shape.heads != q.heads {
        if shape.heads != 1 {
            return Err(Error::Mismatch {
                what: "number of query heads",
                expected: shape.heads,
                found: q.heads,
            });
        }
        if mask.mask_mod().depends_on(Axis::Head) {
            return Err(Error::Broadcast {
                axis: Axis::Head,
                wanted: q.heads,
            });
        }
    }
    for (what, needed, found) in [
        ("the output", q.output_len(), out.len()),
        (
            "the log-sum-exp",
            q.lse_len(),
            lse.as_ref().map_or(q.lse_len(), |lse| lse.len()),
        ),
    ] {
        if found != needed {
            return Err(Error::Mismatch {
                what,
                expected: needed,
                found,
            });
        }
    }
    let scale = options.scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    if !scale.is_finite() {
        return Err(Error::Scale);
    }
    if let Some(score_mod) = score_mod {
        let longest = (0..shape.batch).map(|b| mask.kv_len(b)).max().unwrap_or(0);
        let batch = if packed { shape.batch } else { q.batch };
        let q_positions = 0..mask.position_end();
        score_mod.check(&Domain {
            batch,
            heads: q.heads,
            q: q_positions,
            kv: 0..longest,
        })?;
    }
    plan::attend(
        &Problem {
            q,
            source,
            kv_heads,
            mask,
            packed,
            score_mod,
            scale,
        },
        out,
        lse,
    );
    Ok(())
}
