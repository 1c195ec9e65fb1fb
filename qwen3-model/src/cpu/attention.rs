//! Attention over the paged cache.

use paged_kv::{KvSlice, KvView};

use crate::{Qwen3Config, Result, StepPlan};

/// The mask of the step at hand.
#[derive(Default)]
pub(super) struct Attention {
    rows: Vec<Vec<usize>>,
}

impl Attention {
    pub(super) fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        self.rows.clear();
        for chunk in plan.chunks() {
            for p in chunk.start..chunk.start + chunk.len {
                self.rows.push(
                    (0..=p)
                        .filter_map(|i| plan.table().physical(chunk.slot, i))
                        .collect(),
                );
            }
        }
        Ok(())
    }

    pub(super) fn run(
        &self,
        config: &Qwen3Config,
        qkv: &[f32],
        view: KvView<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let d = config.head_dim;
        let group = config.n_heads / config.n_kv_heads;
        let positions = view.layout.n_pages * view.layout.page_size;
        let get = |s: KvSlice<'_>, i: usize| match s {
            KvSlice::F32(s) => s[i],
            KvSlice::Bf16(s) => s[i].to_f32(),
        };
        for (row, kv) in self.rows.iter().enumerate() {
            for h in 0..config.n_heads {
                let q = &qkv[row * config.qkv_size() + h * d..][..d];
                let base = h / group * positions * d;
                let s: Vec<f32> = kv
                    .iter()
                    .map(|p| {
                        (0..d).map(|i| q[i] * get(view.k, base + p * d + i)).sum::<f32>() / (d as f32).sqrt()
                    })
                    .collect();
                let m = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let e: Vec<f32> = s.iter().map(|s| (s - m).exp()).collect();
                let sum: f32 = e.iter().sum();
                let out = &mut out[row * config.q_size() + h * d..][..d];
                out.fill(0.0);
                for (p, e) in kv.iter().zip(e) {
                    for i in 0..d {
                        out[i] += e / sum * get(view.v, base + p * d + i);
                    }
                }
            }
        }
        Ok(())
    }
}
