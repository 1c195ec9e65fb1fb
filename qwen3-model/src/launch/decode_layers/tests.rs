//! Sizes that the launch and the kernel must agree on.

use super::params::LayerParams;
use super::*;

#[test]
fn every_row_has_room_for_its_splits() {
    for pairs in [1, 8, 16, 64, 128, 1024] {
        let Splits { tokens, few } = Splits::new(pairs);
        assert!(tokens % 16 == 0 && (16..=MAX_SPLIT).contains(&tokens));
        // Tokens besides the newest.
        for length in [
            0_usize, 1, 63, 64, 65, 1000, 4096, 8192, 8193, 16_384, 16_390, 32_768, 63_488, 63_489, 131_072,
        ] {
            // As the kernel finds them.
            let least = length.div_ceil(MAX_SPLIT);
            let wanted = length.div_ceil(tokens).min(few).max(least).max(1);
            let split = length.div_ceil(wanted).next_multiple_of(16).max(tokens);
            let splits = length.div_ceil(split).max(1);
            assert!(split <= MAX_SPLIT, "{pairs} {length}");
            assert!(splits <= least.max(Splits::MOST_FEW));
            assert!(splits <= few.max(least), "{pairs} {length}");
            // The last one is no mere rest: blocks that share a row end together.
            let last = length - (splits - 1) * split;
            assert!(
                splits == 1 || split - last < 16 * splits || split == tokens,
                "{pairs} {length}"
            );
        }
    }
}

#[test]
fn boxes_cover_every_share_and_fit_a_slot() {
    for halves in [1, 2] {
        for rows in 1..3000 {
            let boxes = Boxes::new(rows, halves);
            let side_by_side = boxes.groups / halves;
            assert!(side_by_side >= 1 && boxes.groups <= WARPS && WARPS.is_multiple_of(boxes.groups));
            assert!(
                boxes.rows * side_by_side * boxes.passes >= rows,
                "{rows}: {boxes:?}"
            );
            assert!(boxes.rows <= MAX_BOX_ROWS);
            assert!(
                ROWS.iter()
                    .all(|&rows| boxes.rows * 2 * CHUNK * 3 <= depths(columns(rows)).0)
            );
            // What the ring of activations is made for.
            assert!(WARPS / boxes.groups <= 16);
        }
    }
}

#[test]
fn shared_memory_fits_a_multiprocessor() {
    for rows in ROWS {
        assert!(shared_bytes(columns(rows)) <= 227 * 1024, "{rows}");
        assert!(depths(columns(rows)).0.is_multiple_of(128));
    }
    // Of Qwen3-8B, the widest that a single row's form is for.
    assert_eq!(MAX_CHUNKS * CHUNK, 12_288);
    // Each layer begins at a multiple of 64 bytes, and the driver takes 32,764.
    assert_eq!(size_of::<LayerParams>(), 576);
    assert_eq!(std::mem::offset_of!(DecodeLayersParams, layers) % 64, 0);
    assert!(size_of::<DecodeLayersParams>() <= cuda_graphs::MAX_PARAMETER_BYTES);
}
