//! Exact classification: how many cells of each KV block a block of queries may attend to.

use std::ops::Range;

use crate::MaskMod;

/// Adds up, for each KV block, its allowed cells over the queries `q` (positions) and keys `0..kv_len`.
pub(super) fn count_cells(
    mask: &MaskMod,
    b: usize,
    h: usize,
    q: Range<usize>,
    kv_len: usize,
    block_kv: usize,
    counts: &mut Vec<u64>,
) {
    counts.clear();
    counts.resize(kv_len.div_ceil(block_kv), 0);
    let mut row = Vec::new();
    for q in q {
        if let Some((low, high)) = mask.key_range(b, h, q, (0, kv_len as i64)) {
            if low < high {
                count_range(low as usize..high as usize, block_kv, counts);
            }
            continue;
        }
        row.resize(kv_len, false);
        mask.eval_row(b, h, q, 0, &mut row);
        for (count, cells) in counts.iter_mut().zip(row.chunks(block_kv)) {
            *count += cells.iter().map(|&cell| u64::from(cell)).sum::<u64>();
        }
    }
}

fn count_range(keys: Range<usize>, block: usize, counts: &mut [u64]) {
    let (first, last) = (keys.start / block, (keys.end - 1) / block);
    if first == last {
        counts[first] += keys.len() as u64;
        return;
    }
    counts[first] += ((first + 1) * block - keys.start) as u64;
    for count in &mut counts[first + 1..last] {
        *count += block as u64;
    }
    counts[last] += (keys.end - last * block) as u64;
}
