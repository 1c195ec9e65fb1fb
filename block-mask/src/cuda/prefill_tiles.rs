//! Chunks cut into the tiles that a prefill kernel takes, with the blocks of keys that each visits.

use super::PrefillChunk;
use crate::launch::PrefillTile;

/// How chunks are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    /// Query heads that share a KV head: rows of a token.
    pub(super) group: usize,
    /// Rows of a tile.
    pub(super) block_m: usize,
    /// Keys of a block.
    pub(super) block_n: usize,
    /// Keys that a query sees at most, its own included; `usize::MAX` without a window.
    pub(super) window: usize,
}

impl Tiling {
    /// The tiles of a chunk, whose index in the step is `index`. A tile visits the blocks from the one with the first key
    /// that its first token sees to the one with its last token, and no other.
    pub(super) fn tiles(self, index: usize, chunk: PrefillChunk) -> impl Iterator<Item = PrefillTile> {
        let rows = chunk.q_len * self.group;
        (0..rows).step_by(self.block_m).map(move |first_row| {
            let last_row = (first_row + self.block_m).min(rows) - 1;
            // Keys that the tile's first and last token see, counted from the sequence's first.
            let shortest = chunk.position + first_row / self.group + 1;
            let longest = chunk.position + last_row / self.group + 1;
            let first_block = shortest.saturating_sub(self.window) / self.block_n;
            PrefillTile {
                q_start: chunk.q_start as i32,
                q_len: chunk.q_len as i32,
                slot: chunk.slot.index() as i32,
                position: chunk.position as i32,
                first_row: first_row as i32,
                chunk: index as i32,
                first_block: first_block as i32,
                blocks: (longest.div_ceil(self.block_n) - first_block) as i32,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use paged_kv::{PageTable, PageTableConfig};

    use super::*;
    use crate::{PackedSequence, paged_causal_mask};

    /// The lists of a block mask with a tile's tokens as its query blocks and a block of keys as its pages.
    fn check(lens: &[(usize, usize)], tiling: Tiling, window: Option<usize>) {
        let (block_q, block_n) = (tiling.block_m / tiling.group, tiling.block_n);
        let pages = |end: usize| end.div_ceil(block_n);
        let config = PageTableConfig {
            n_pages: 1 + lens.iter().map(|(start, len)| pages(start + len)).sum::<usize>(),
            page_size: block_n,
            n_slots: lens.len() + 1,
            max_pages_per_slot: lens.iter().map(|(start, len)| pages(start + len)).max().unwrap(),
        };
        let mut table = PageTable::new(config).unwrap();
        let mut q_start = 0;
        let sequences: Vec<PackedSequence> = lens
            .iter()
            .map(|&(kv_start_pos, q_len)| {
                let slot = table.allocate_slot().unwrap();
                let _ = table.reserve(slot, kv_start_pos + q_len).unwrap();
                q_start += q_len;
                PackedSequence {
                    slot,
                    q_start: q_start - q_len,
                    q_len,
                    kv_start_pos,
                }
            })
            .collect();
        let mask = paged_causal_mask(&table, &sequences, block_q, window).unwrap();
        let mut visited = 0;
        for (b, sequence) in sequences.iter().enumerate() {
            let chunk = PrefillChunk {
                slot: sequence.slot,
                q_start: sequence.q_start,
                q_len: sequence.q_len,
                position: sequence.kv_start_pos,
            };
            for (r, tile) in tiling.tiles(b, chunk).enumerate() {
                let listed: Vec<usize> = mask.blocks(b, 0, r).map(|block| block.logical).collect();
                let first = tile.first_block as usize;
                let taken: Vec<usize> = (first..first + tile.blocks as usize).collect();
                assert_eq!(
                    taken, listed,
                    "{lens:?}, sequence {b}, tile {r}, window {window:?}"
                );
                visited += taken.len();
            }
        }
        assert_eq!(visited, mask.n_blocks(), "{lens:?}, window {window:?}");
    }

    #[test]
    fn tiles_visit_exactly_the_blocks_of_the_document_causal_mask() {
        // (tokens in the cache, tokens of the chunk): first pieces, later ones, decode rows.
        let batches: [&[(usize, usize)]; 4] = [
            &[(0, 4096)],
            &[(0, 1), (0, 127), (0, 128), (0, 129), (500, 1), (1000, 300)],
            &[(127, 1), (128, 1), (129, 1), (0, 33)],
            &[(31, 64), (96, 32), (7, 700)],
        ];
        for lens in batches {
            for group in [1, 2, 4, 8, 16] {
                for (block_m, block_n) in [(128, 128), (128, 64), (64, 32)] {
                    for window in [None, Some(1), Some(100), Some(129)] {
                        let tiling = Tiling {
                            group,
                            block_m,
                            block_n,
                            window: window.unwrap_or(usize::MAX),
                        };
                        check(lens, tiling, window);
                    }
                }
            }
        }
    }
}
