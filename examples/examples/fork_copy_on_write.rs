//! Eight samples of one prompt: its pages are stored once, and only the partly written last page is copied.
//!
//! ```text
//! cargo run --release -p examples --example fork_copy_on_write
//! ```
#![expect(clippy::print_stdout, reason = "the example shows what happens")]

use paged_kv::{Error, KvCache, KvDtype, KvLayout, PageTable, PageTableConfig, Slot};

const PAGE_SIZE: usize = 16;
const PROMPT: usize = 1_000;
const SAMPLES: usize = 8;

fn main() -> Result<(), Error> {
    let config = PageTableConfig {
        n_pages: 256,
        page_size: PAGE_SIZE,
        n_slots: 9,
        max_pages_per_slot: 128,
    };
    let mut table = PageTable::new(config)?;
    let mut cache = KvCache::new(KvLayout {
        n_layers: 1,
        kv_heads: 1,
        head_dim: 1,
        n_pages: config.n_pages,
        page_size: config.page_size,
        dtype: KvDtype::F32,
    })?;

    // The prompt is computed once; what a token stores is its own number.
    let first = table.allocate_slot()?;
    for token in 0..PROMPT {
        append(&mut table, &mut cache, first, token as f32)?;
    }
    let prompt_pages = config.n_pages - 1 - table.free_pages();

    // The other samples start from it. Each then writes different tokens.
    let mut samples = vec![first];
    for _ in 1..SAMPLES {
        samples.push(table.fork(first)?);
    }
    let mut copies = 0;
    for step in 0..4 {
        for (i, &slot) in samples.iter().enumerate() {
            copies += usize::from(append(
                &mut table,
                &mut cache,
                slot,
                (10_000 * (i + 1) + step) as f32,
            )?);
        }
    }
    let used = config.n_pages - 1 - table.free_pages();
    println!("a prompt of {PROMPT} tokens: {prompt_pages} pages");
    println!("{SAMPLES} samples of it: {used} pages, {copies} pages copied");
    println!(
        "without sharing: {} pages",
        SAMPLES * (PROMPT + 4).div_ceil(PAGE_SIZE)
    );
    assert_eq!((prompt_pages, used, copies), (63, 63 + SAMPLES - 1, SAMPLES - 1));

    // Each sample still reads the prompt, and its own tokens after it.
    let view = cache.layer(0)?;
    for (i, &slot) in samples.iter().enumerate() {
        for position in 0..table.len(slot)? {
            let place = table.physical(slot, position).expect("the position is written");
            let expected = if position < PROMPT {
                position
            } else {
                10_000 * (i + 1) + position - PROMPT
            };
            assert_eq!(
                view.key(0, place).expect("the place exists").to_f32_vec(),
                [expected as f32]
            );
        }
    }
    println!("every sample reads its own tokens");
    Ok(())
}

/// Writes one token. Returns whether a page was copied first.
fn append(table: &mut PageTable, cache: &mut KvCache, slot: Slot, token: f32) -> Result<bool, Error> {
    let position = table.len(slot)?;
    let copy = table.reserve(slot, position + 1)?.copy;
    cache.copy_pages(copy.as_slice())?;
    let mut place = Vec::new();
    table.write_positions(slot, position..position + 1, &mut place)?;
    cache.write(0, &place, &[token], &[token])?;
    table.advance(slot, 1)?;
    Ok(copy.is_some())
}
