//! Two sequences of different lengths share one pool of pages and grow in turns.
//!
//! ```text
//! cargo run --release -p examples --example page_table
//! ```
#![expect(clippy::print_stdout, reason = "the example shows what happens")]

use paged_kv::{Error, KvCache, KvDtype, KvLayout, PageTable, PageTableConfig, Slot};

fn main() -> Result<(), Error> {
    // Page 0 and slot 0 are reserved for padding rows: 7 pages and 3 slots can be used.
    let config = PageTableConfig {
        n_pages: 8,
        page_size: 4,
        n_slots: 4,
        max_pages_per_slot: 5,
    };
    let mut table = PageTable::new(config)?;
    let mut cache = KvCache::new(KvLayout {
        n_layers: 2,
        kv_heads: 2,
        head_dim: 8,
        n_pages: config.n_pages,
        page_size: config.page_size,
        dtype: KvDtype::Bf16,
    })?;

    let (a, b) = (table.allocate_slot()?, table.allocate_slot()?);
    append(&mut table, &mut cache, a, 6)?; // a prompt of 6 tokens
    append(&mut table, &mut cache, b, 3)?; // a prompt of 3 tokens
    for _ in 0..4 {
        append(&mut table, &mut cache, a, 1)?; // one new token each per step
        append(&mut table, &mut cache, b, 1)?;
    }
    for slot in [a, b] {
        println!(
            "slot {slot}: {} tokens, row {:?}",
            table.len(slot)?,
            table.row(slot)
        );
    }
    let place = table.physical(a, 9).expect("position 9 is written");
    println!(
        "token 9 of slot {a} lies at place {place}: page {}, entry {}",
        place / 4,
        place % 4
    );

    println!(
        "free pages: {}; can slot {b} hold 20 tokens? {}",
        table.free_pages(),
        table.can_reserve(b, 20)
    );
    table.erase(a)?;
    println!(
        "slot {a} erased; can slot {b} hold 20 tokens? {}",
        table.can_reserve(b, 20)
    );
    assert!(table.can_reserve(b, 20));
    Ok(())
}

/// Reserves, writes keys and values of `n` tokens in every layer, and records them as written.
fn append(table: &mut PageTable, cache: &mut KvCache, slot: Slot, n: usize) -> Result<(), Error> {
    let start = table.len(slot)?;
    let reservation = table.reserve(slot, start + n)?;
    cache.copy_pages(reservation.copy.as_slice())?;
    let mut places = Vec::new();
    table.write_positions(slot, start..start + n, &mut places)?;
    let layout = *cache.layout();
    for layer in 0..layout.n_layers {
        let k = vec![1.0; n * layout.kv_heads * layout.head_dim];
        let v = vec![2.0; k.len()];
        cache.write(layer, &places, &k, &v)?;
    }
    table.advance(slot, n)
}
