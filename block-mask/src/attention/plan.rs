//! Sharing the work out over threads.

use rayon::prelude::*;

use super::tile::{Tile, attend_tile};
use super::{QueryView, Source};
use crate::mask::{BlockMask, Space};
use crate::score_mod::ScoreMod;

/// A checked attention problem.
pub(super) struct Problem<'a, S: Space> {
    pub(super) q: QueryView<'a>,
    pub(super) source: Source<'a>,
    pub(super) kv_heads: usize,
    pub(super) mask: &'a BlockMask<S>,
    pub(super) packed: bool,
    pub(super) score_mod: Option<&'a ScoreMod>,
    pub(super) scale: f32,
}

/// One task per (query block, KV head), or per (query block, query head) when heads have lists of their own. Each owns the
/// output rows of its queries, so nothing is shared and the number of threads cannot change a result.
pub(super) fn attend<S: Space>(problem: &Problem<'_, S>, out: &mut [f32], lse: Option<&mut [f32]>) {
    let (q, mask) = (&problem.q, problem.mask);
    let shape = mask.shape();
    let group = q.heads / problem.kv_heads;
    let mut outs: Vec<Option<&mut [f32]>> = out.chunks_exact_mut(q.head_dim).map(Some).collect();
    let mut lses: Vec<Option<&mut f32>> = match lse {
        Some(lse) => lse.iter_mut().map(Some).collect(),
        None => Vec::new(),
    };

    let heads_per_tile = if shape.heads > 1 { 1 } else { group };
    let batch = if problem.packed { shape.batch } else { q.batch };
    let mut tiles = Vec::new();
    for b in 0..batch {
        // A logical mask for one batch row serves all of them.
        let mask_b = b.min(shape.batch - 1);
        let Some(span) = mask.queries(mask_b) else {
            continue;
        };
        for r in 0..span.len.div_ceil(shape.block_q) {
            let first = r * shape.block_q;
            let rows = shape.block_q.min(span.len - first);
            for head in (0..q.heads).step_by(heads_per_tile) {
                let mut tile = Tile {
                    b,
                    mask_b,
                    r,
                    position: span.position + first,
                    row: span.row + first,
                    rows,
                    head,
                    heads: heads_per_tile,
                    kv_head: head / group,
                    outs: Vec::with_capacity(rows * heads_per_tile),
                    lses: Vec::with_capacity(if lses.is_empty() { 0 } else { rows * heads_per_tile }),
                };
                for row in tile.row..tile.row + rows {
                    for h in head..head + heads_per_tile {
                        let piece = if problem.packed {
                            row * q.heads + h
                        } else {
                            (b * q.heads + h) * q.len + row
                        };
                        tile.outs.extend(outs[piece].take());
                        tile.lses.extend(lses.get_mut(piece).and_then(Option::take));
                    }
                }
                tiles.push(tile);
            }
        }
    }
    // Rows that belong to no sequence attend to nothing.
    outs.into_iter().flatten().for_each(|row| row.fill(0.0));
    lses.into_iter()
        .flatten()
        .for_each(|row| *row = f32::NEG_INFINITY);

    if tiles.len() == 1 {
        tiles.into_iter().for_each(|tile| attend_tile(problem, tile));
    } else {
        tiles
            .into_par_iter()
            .with_max_len(1)
            .for_each(|tile| attend_tile(problem, tile));
    }
}
