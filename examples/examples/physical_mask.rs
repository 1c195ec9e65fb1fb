//! One step of an engine over a paged cache: a prompt and a decoding row together, on scattered pages.
//!
//! cargo run --release -p examples --example physical_mask

use block_mask::{FlexOptions, PackedSequence, QueryView, flex_attention, paged_causal_mask};
use paged_kv::{KvCache, KvDtype, KvLayout, PageTable, PageTableConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (n_pages, page_size, heads, kv_heads, head_dim) = (16, 4, 4, 2, 8);
    let config = PageTableConfig {
        n_pages,
        page_size,
        n_slots: 4,
        max_pages_per_slot: 8,
    };
    let mut table = PageTable::new(config)?;
    let layout = KvLayout {
        n_layers: 1,
        kv_heads,
        head_dim,
        n_pages,
        page_size,
        dtype: KvDtype::F32,
    };
    let mut cache = KvCache::new(layout)?;
    cache.fill(f32::NAN); // nothing that is not written is ever read

    // Two sequences that grow in turns: their pages interleave.
    let (prompt, running) = (table.allocate_slot()?, table.allocate_slot()?);
    for len in [4, 8, 12] {
        let _ = table.reserve(running, len)?;
        let _ = table.reserve(prompt, len.min(6))?;
    }
    for (slot, len) in [(prompt, 6), (running, 10)] {
        let mut places = Vec::new();
        table.write_positions(slot, 0..len, &mut places)?;
        let values: Vec<f32> = (0..len * kv_heads * head_dim)
            .map(|i| (i as f32 * 0.31).sin())
            .collect();
        cache.write(0, &places, &values, &values)?;
        table.advance(slot, len)?;
    }

    // Rows 0..6: the prompt from its start. Row 6: the token at position 9 of the running sequence.
    let step = [
        PackedSequence {
            slot: prompt,
            q_start: 0,
            q_len: 6,
            kv_start_pos: 0,
        },
        PackedSequence {
            slot: running,
            q_start: 6,
            q_len: 1,
            kv_start_pos: 9,
        },
    ];
    let mask = paged_causal_mask(&table, &step, 16, None)?;
    for (b, name) in ["prompt", "running"].iter().enumerate() {
        let blocks = mask.blocks(b, 0, 0).map(|block| {
            let kind = if block.full { "full" } else { "partial" };
            format!("block {} in page {} ({kind})", block.logical, block.index)
        });
        println!("{name}: {}", blocks.collect::<Vec<_>>().join(", "));
    }

    let queries: Vec<f32> = (0..7 * heads * head_dim)
        .map(|i| (i as f32 * 0.17).cos())
        .collect();
    let view = QueryView::packed(&queries, 7, heads, head_dim)?;
    let (mut out, mut lse) = (vec![0.0; view.output_len()], vec![0.0; view.lse_len()]);
    flex_attention(
        view,
        cache.layer(0)?,
        &mask,
        None,
        &FlexOptions::default(),
        &mut out,
        Some(&mut lse),
    )?;
    assert!(out.iter().chain(&lse).all(|x| x.is_finite()));
    println!(
        "log-sum-exp of the running row, per head: {:.4?}",
        &lse[6 * heads..]
    );
    Ok(())
}
