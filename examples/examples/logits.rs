//! What a model thinks comes next: loads the small model of this repository, or the folder given
//! as argument, and prints the likeliest next tokens after a sequence of token ids.
//!
//! ```text
//! cargo run --release -p examples --example logits [-- DIR ID…]
//! ```

use std::error::Error;

use paged_kv::{PageTable, PageTableConfig};
use qwen3_model::{LoadOptions, Model, SequenceChunk, StepBatch};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let bundled = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../rollout-engine/models/tiny-qwen3-math"
    );
    let dir = arguments.next().unwrap_or_else(|| bundled.to_owned());
    let mut ids = arguments.map(|id| id.parse()).collect::<Result<Vec<u32>, _>>()?;
    if ids.is_empty() {
        // "Repeat and count: apples." in the bundled model's chat form.
        ids = vec![569, 288, 198, 524, 316, 522, 25, 387, 13, 570, 198, 569, 290, 198];
    }

    let options = LoadOptions::default();
    let mut model = Model::load(&dir, &options)?;
    let mut table = PageTable::new(PageTableConfig {
        n_pages: options.n_pages,
        page_size: options.page_size,
        n_slots: 2,
        max_pages_per_slot: options.n_pages,
    })?;
    let slot = table.allocate_slot()?;
    let _nothing_to_copy = table.reserve(slot, ids.len())?;
    let chunk = SequenceChunk {
        slot,
        start: 0,
        len: ids.len(),
        wants_logits: true,
    };
    let logits = model.forward(
        &StepBatch {
            token_ids: &ids,
            chunks: &[chunk],
        },
        &table,
    )?;

    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
    let mut ranked: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    println!("after {} tokens of {dir}:", ids.len());
    for (id, logit) in &ranked[..5.min(ranked.len())] {
        println!(
            "{id:>7}  logit {logit:>8.3}  probability {:.4}",
            (logit - max).exp() / total
        );
    }
    Ok(())
}
