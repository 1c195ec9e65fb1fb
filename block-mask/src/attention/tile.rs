//! One tile: the queries of one query block under the heads of one KV head, over all blocks they visit.
//!
//! ```text
//!              block i                 block i + 1
//!           k0  k1  k2 …  ┐
//! q0 h0   [ s   s   s  … ]│  scores of one block at a time; then per row
//! q0 h1   [ s   s   s  … ]│      m' = max(m, scores)       running maximum
//! q1 h0   [ s   s   s  … ]│      acc, l *= exp(m − m')     rescale what was summed under the old one
//! …                       ┘      acc += exp(s − m') · v,  l += exp(s − m')
//! ```
//!
//! Row `i · heads + j` of a tile is query `i` under its `j`-th head.

use std::cell::RefCell;

use half::bf16;
use paged_kv::KvSlice;
use pulp::{Arch, Simd, WithSimd};

use super::plan::Problem;
use super::simd::{LANES, accumulate, dots, exp, exponentials, largest};
use super::touch::{self, AHEAD, FEW_ROWS};
use crate::expr::Axis;
use crate::mask::Space;

/// Keys whose vectors are kept in the first-level cache while all rows of a tile pass over them.
const KEYS_AT_ONCE: usize = 32;

/// What one task computes, and where the result goes.
pub(super) struct Tile<'a> {
    /// Batch row as the functions and the storage see it.
    pub(super) b: usize,
    /// Batch row of the mask.
    pub(super) mask_b: usize,
    /// Query block.
    pub(super) r: usize,
    /// Logical position of the first query.
    pub(super) position: usize,
    /// Row of the first query in the query tensor.
    pub(super) row: usize,
    /// Queries.
    pub(super) rows: usize,
    /// First query head.
    pub(super) head: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Their KV head.
    pub(super) kv_head: usize,
    /// Output of each row of the tile.
    pub(super) outs: Vec<&'a mut [f32]>,
    /// Log-sum-exp of each row of the tile; empty if not wanted.
    pub(super) lses: Vec<&'a mut f32>,
}

/// Which keys of the current block a row attends to.
#[derive(Clone, Copy, PartialEq)]
struct Keys {
    start: usize,
    end: usize,
    /// Row of `cells` to ask for each key in the range, if not all are allowed.
    cells: Option<usize>,
}

/// Buffers that live as long as their thread.
#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    acc: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    scores: Vec<f32>,
    keys: Vec<Keys>,
    cells: Vec<bool>,
    k: Vec<f32>,
    v: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

pub(super) fn attend_tile<S: Space>(problem: &Problem<'_, S>, tile: Tile<'_>) {
    SCRATCH.with_borrow_mut(|scratch| {
        Arch::new().dispatch(Run {
            problem,
            tile,
            scratch,
        })
    });
}

struct Run<'a, 'p, S: Space> {
    problem: &'a Problem<'p, S>,
    tile: Tile<'a>,
    scratch: &'a mut Scratch,
}

impl<Sp: Space> WithSimd for Run<'_, '_, Sp> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Run {
            problem,
            mut tile,
            scratch,
        } = self;
        let shape = problem.mask.shape();
        let (dim, block, n) = (problem.q.head_dim, shape.block_kv, tile.rows * tile.heads);
        let stride = block.next_multiple_of(LANES);
        scratch.start(problem, &tile, n, stride);
        let kv_len = problem.mask.kv_len(tile.mask_b);
        let mask_head = if shape.heads > 1 { tile.head } else { 0 };

        let source = problem.source;
        let base = tile.b * source.batch_stride + tile.kv_head * source.head_stride;
        let blocks = || problem.mask.blocks(tile.mask_b, mask_head, tile.r);
        for (met, visited) in blocks().enumerate() {
            if n <= FEW_ROWS && met % AHEAD == 0 {
                for next in blocks().skip(met).take(AHEAD) {
                    touch::memory_pages(source.k, base + next.index * block * dim, block * dim);
                    touch::memory_pages(source.v, base + next.index * block * dim, block * dim);
                }
            }
            let first = visited.logical * block;
            let count = block.min(kv_len.saturating_sub(first));
            scratch.allowed(problem, &tile, visited.full, first, count);
            let start = base + visited.index * block * dim;
            if n <= FEW_ROWS {
                touch::lines(source.k, start, count * dim);
                touch::lines(source.v, start, count * dim);
            }
            let Scratch {
                q,
                acc,
                max,
                sum,
                scores,
                keys,
                cells,
                k,
                v,
            } = &mut *scratch;
            let k = widen(source.k, start, count * dim, k);
            let v = widen(source.v, start, count * dim, v);

            for from in (0..count).step_by(KEYS_AT_ONCE) {
                let to = count.min(from + KEYS_AT_ONCE);
                block_scores(simd, q, k, dim, keys, from, to, scores, stride);
            }
            for (row, keys) in keys.iter_mut().enumerate() {
                if keys.start >= keys.end {
                    continue;
                }
                let scores = &mut scores[row * stride..(row + 1) * stride];
                if let Some(score_mod) = problem.score_mod {
                    let (i, j) = (row / tile.heads, row % tile.heads);
                    let scores = &mut scores[keys.start..keys.end];
                    score_mod.eval_row(
                        tile.b,
                        tile.head + j,
                        tile.position + i,
                        first + keys.start,
                        scores,
                    );
                }
                if let Some(cells_row) = keys.cells {
                    let cells = &cells[cells_row * block..][keys.start..keys.end];
                    for (score, &allowed) in scores[keys.start..keys.end].iter_mut().zip(cells) {
                        *score = if allowed { *score } else { f32::NEG_INFINITY };
                    }
                }
                // Whole runs of lanes, what lies outside the range being masked.
                let (low, high) = (keys.start / LANES * LANES, keys.end.next_multiple_of(LANES));
                scores[low..keys.start].fill(f32::NEG_INFINITY);
                scores[keys.end..high].fill(f32::NEG_INFINITY);
                let scores = &mut scores[low..high];
                let old = max[row];
                let block_max = largest(scores);
                let new = if block_max > old { block_max } else { old };
                if new == f32::NEG_INFINITY {
                    // Nothing allowed so far, or only NaN, which must not pass for nothing.
                    if scores.iter().any(|score| score.is_nan()) {
                        sum[row] = f32::NAN;
                    }
                    keys.end = keys.start;
                    continue;
                }
                if new != old {
                    let factor = exp(old - new);
                    max[row] = new;
                    sum[row] *= factor;
                    acc[row * dim..(row + 1) * dim]
                        .iter_mut()
                        .for_each(|x| *x *= factor);
                }
                sum[row] += exponentials(scores, new);
            }
            for from in (0..count).step_by(KEYS_AT_ONCE) {
                let to = count.min(from + KEYS_AT_ONCE);
                block_values(simd, acc, v, dim, keys, cells, block, from, to, scores, stride);
            }
        }

        for (row, out) in tile.outs.iter_mut().enumerate() {
            let sum = scratch.sum[row];
            let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
            for (out, acc) in out.iter_mut().zip(&scratch.acc[row * dim..(row + 1) * dim]) {
                *out = acc * factor;
            }
        }
        for (row, lse) in tile.lses.iter_mut().enumerate() {
            **lse = scratch.max[row] + scratch.sum[row].ln();
        }
    }
}

impl Scratch {
    /// Takes in the queries, scaled, and clears the sums.
    #[inline(always)]
    fn start<S: Space>(&mut self, problem: &Problem<'_, S>, tile: &Tile<'_>, n: usize, stride: usize) {
        let dim = problem.q.head_dim;
        self.q.clear();
        for row in 0..tile.rows {
            for head in tile.head..tile.head + tile.heads {
                let b = if problem.packed { 0 } else { tile.b };
                let q = problem.q.row(b, tile.row + row, head);
                self.q.extend(q.iter().map(|x| x * problem.scale));
            }
        }
        for (buffer, len, value) in [
            (&mut self.acc, n * dim, 0.0),
            (&mut self.sum, n, 0.0),
            (&mut self.max, n, f32::NEG_INFINITY),
            (&mut self.scores, n * stride, 0.0),
        ] {
            buffer.clear();
            buffer.resize(len, value);
        }
    }

    /// Finds out which of the `count` keys from `first` each row attends to.
    fn allowed<S: Space>(
        &mut self,
        problem: &Problem<'_, S>,
        tile: &Tile<'_>,
        full: bool,
        first: usize,
        count: usize,
    ) {
        self.keys.clear();
        let all = Keys {
            start: 0,
            end: count,
            cells: None,
        };
        if full {
            self.keys.resize(tile.rows * tile.heads, all);
            return;
        }
        let mask_mod = problem.mask.mask_mod();
        let block = problem.mask.shape().block_kv;
        self.cells.resize(tile.rows * tile.heads * block, false);
        let by_head = mask_mod.depends_on(Axis::Head);
        for i in 0..tile.rows {
            for j in 0..tile.heads {
                let row = i * tile.heads + j;
                if j > 0 && !by_head {
                    self.keys.push(self.keys[row - 1]);
                    continue;
                }
                let (b, h, q) = (tile.b, tile.head + j, tile.position + i);
                let range = (first as i64, (first + count) as i64);
                let keys = match mask_mod.key_range(b, h, q, range) {
                    Some((low, high)) if low < high => Keys {
                        start: low as usize - first,
                        end: high as usize - first,
                        cells: None,
                    },
                    Some(_) => Keys {
                        start: 0,
                        end: 0,
                        cells: None,
                    },
                    None => {
                        mask_mod.eval_row(b, h, q, first, &mut self.cells[row * block..row * block + count]);
                        Keys {
                            cells: Some(row),
                            ..all
                        }
                    }
                };
                self.keys.push(keys);
            }
        }
    }
}

/// Elements `start..start + len` as f32.
#[inline(always)]
fn widen<'a>(source: KvSlice<'a>, start: usize, len: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
    match source {
        KvSlice::F32(values) => &values[start..start + len],
        KvSlice::Bf16(values) => {
            buffer.resize(buffer.len().max(len), 0.0);
            let buffer = &mut buffer[..len];
            for (wide, narrow) in buffer.iter_mut().zip(&values[start..start + len]) {
                *wide = widen_one(*narrow);
            }
            buffer
        }
    }
}

/// bf16 is the upper half of an f32; spelled out so that the loop over it is vector code.
#[inline(always)]
fn widen_one(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Adds the values of the keys `from..to`, weighted, to the sums of all rows.
#[inline(always)]
fn block_values<S: Simd>(
    simd: S,
    acc: &mut [f32],
    v: &[f32],
    dim: usize,
    keys: &[Keys],
    cells: &[bool],
    block: usize,
    from: usize,
    to: usize,
    weights: &[f32],
    stride: usize,
) {
    let mut row = 0;
    while row < keys.len() {
        let Keys {
            start,
            end,
            cells: cells_row,
        } = keys[row];
        let (start, end) = (start.max(from), end.min(to));
        if start >= end {
            row += 1;
            continue;
        }
        let acc = &mut acc[row * dim..];
        let Some(cells_row) = cells_row else {
            let same = keys[row..]
                .iter()
                .take(4)
                .take_while(|other| **other == keys[row])
                .count();
            let (weights, v) = (&weights[row * stride + start..], &v[start * dim..end * dim]);
            row += match same {
                4 => {
                    accumulate::<S, 4, 2>(simd, acc, dim, weights, stride, end - start, v);
                    4
                }
                2 | 3 => {
                    accumulate::<S, 2, 4>(simd, acc, dim, weights, stride, end - start, v);
                    2
                }
                _ => {
                    accumulate::<S, 1, 8>(simd, acc, dim, weights, stride, end - start, v);
                    1
                }
            };
            continue;
        };
        // Masked values are left out rather than multiplied by 0: they may be NaN.
        let cells = &cells[cells_row * block..][..block];
        let mut key = start;
        while key < end {
            let run = cells[key..end].iter().take_while(|&&cell| cell).count();
            let weights = &weights[row * stride + key..];
            accumulate::<S, 1, 8>(
                simd,
                acc,
                dim,
                weights,
                stride,
                run,
                &v[key * dim..(key + run) * dim],
            );
            key += run;
            key += cells[key..end].iter().take_while(|&&cell| !cell).count();
        }
        row += 1;
    }
}

/// Scores of the keys `from..to` for all rows of a tile, four, two or one row at a time.
#[inline(always)]
fn block_scores<S: Simd>(
    simd: S,
    q: &[f32],
    k: &[f32],
    dim: usize,
    keys: &[Keys],
    from: usize,
    to: usize,
    scores: &mut [f32],
    stride: usize,
) {
    let mut row = 0;
    macro_rules! rows {
        ($rows:literal, $keys:literal, $keyword:ident) => {
            $keyword keys.len() - row >= $rows {
                score_rows::<S, $rows, $keys>(simd, q, k, dim, row, keys, from, to, scores, stride);
                row += $rows;
            }
        };
    }
    rows!(4, 2, while);
    rows!(2, 4, if);
    rows!(1, 8, if);
    debug_assert_eq!(row, keys.len());
}

#[inline(always)]
fn score_rows<S: Simd, const R: usize, const T: usize>(
    simd: S,
    q: &[f32],
    k: &[f32],
    dim: usize,
    row: usize,
    keys: &[Keys],
    from: usize,
    to: usize,
    scores: &mut [f32],
    stride: usize,
) {
    let group = keys[row..row + R].iter().filter(|keys| keys.start < keys.end);
    let (low, high) = group.fold((to, from), |(low, high), keys| {
        (low.min(keys.start), high.max(keys.end))
    });
    let (mut key, end) = (low.max(from), high.min(to));
    let none: &[f32] = &[];
    let mut queries = [none; R];
    for r in 0..R {
        queries[r] = &q[(row + r) * dim..(row + r + 1) * dim];
    }
    while key + T <= end {
        let mut run = [none; T];
        for t in 0..T {
            run[t] = &k[(key + t) * dim..(key + t + 1) * dim];
        }
        let result = dots::<S, R, T>(simd, queries, run);
        for r in 0..R {
            scores[(row + r) * stride + key..][..T].copy_from_slice(&result[r]);
        }
        key += T;
    }
    while key < end {
        let result = dots::<S, R, 1>(simd, queries, [&k[key * dim..(key + 1) * dim]]);
        for r in 0..R {
            scores[(row + r) * stride + key] = result[r][0];
        }
        key += 1;
    }
}
