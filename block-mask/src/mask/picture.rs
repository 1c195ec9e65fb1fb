//! Masks as people look at them.

use std::fmt;

use super::{BlockMask, Space};

/// Most pictures of one mask, and characters of each.
const MOST_PICTURES: usize = 4;
const MOST_ROWS: usize = 32;
const MOST_COLUMNS: usize = 64;

/// A line with shape, block sizes and [sparsity](BlockMask::sparsity), then a picture for each of the first batch rows and
/// heads: query blocks downwards, the sequence's key blocks to the right, `█` visited whole, `▒` in part, `·` not at all. A
/// character stands for several blocks where there are more than 32 by 64.
///
/// ```
/// use block_mask::{BlockMask, MaskMod, MaskShape};
///
/// let window = MaskMod::causal() & MaskMod::sliding_window(5);
/// let mask = BlockMask::from_fn(MaskShape::new(1, 1, 8, 8).with_blocks(2, 2), window)?;
/// let picture = "\
/// BlockMask(shape=(1, 1, 8, 8), block_size=(2, 2), sparsity=43.75%)
/// (0, 0)
/// ▒···
/// █▒··
/// ▒█▒·
/// ·▒█▒";
/// assert_eq!(mask.to_string(), picture);
/// # Ok::<(), block_mask::Error>(())
/// ```
impl<S: Space> fmt::Display for BlockMask<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = self.shape();
        write!(
            f,
            "BlockMask(shape=({}, {}, {}, {}), block_size=({}, {}), sparsity={:.2}%)",
            shape.batch,
            shape.heads,
            shape.q_len,
            shape.kv_len,
            shape.block_q,
            shape.block_kv,
            self.sparsity()
        )?;
        let pictures = shape.batch.saturating_mul(shape.heads);
        for picture in 0..pictures.min(MOST_PICTURES) {
            self.draw(f, picture / shape.heads, picture % shape.heads)?;
        }
        match pictures.saturating_sub(MOST_PICTURES) {
            0 => Ok(()),
            more => write!(f, "\n(and {more} more)"),
        }
    }
}

impl<S: Space> BlockMask<S> {
    fn draw(&self, f: &mut fmt::Formatter<'_>, b: usize, h: usize) -> fmt::Result {
        write!(f, "\n({b}, {h})")?;
        let rows = self
            .queries(b)
            .map_or(0, |span| span.len.div_ceil(self.shape().block_q));
        let columns = self.kv_len(b).div_ceil(self.shape().block_kv);
        // Blocks of a character, each way.
        let (high, wide) = (
            rows.div_ceil(MOST_ROWS).max(1),
            columns.div_ceil(MOST_COLUMNS).max(1),
        );
        for top in (0..rows).step_by(high) {
            let below = rows.min(top + high);
            // Of each character, blocks that are visited, and of these the ones that are so as a whole.
            let mut counts = vec![(0, 0); columns.div_ceil(wide)];
            for block in (top..below).flat_map(|r| self.blocks(b, h, r)) {
                if let Some((visited, full)) = counts.get_mut(block.logical / wide) {
                    *visited += 1;
                    *full += usize::from(block.full);
                }
            }
            let line = counts.iter().enumerate().map(|(i, &(visited, full))| {
                let blocks = (below - top) * (columns.min((i + 1) * wide) - i * wide);
                match (visited, full) {
                    (0, _) => '·',
                    (_, full) if full == blocks => '█',
                    _ => '▒',
                }
            });
            write!(f, "\n{}", line.collect::<String>())?;
        }
        Ok(())
    }
}
