//! The operations of a step, and what else a [`Backend`] does, on the processor.

use std::borrow::Cow;
use std::time::Instant;

use lora_merge::{ActiveAdapter, ModuleUpdate, PolicyVersion, PristineSource};
use paged_kv::{KvLayout, PageCopy};

use super::elementwise::{add, for_rows, norm_rope, rms_norm, silu_mul, widen};
use super::matmul::{Matrix, matmul};
use super::policies::{complete, served};
use super::runtime_update::{Columns, RuntimePolicies};
use super::{Buffers, CpuBackend, Step};
use crate::adapters::module_index;
use crate::digest::{Parameter, Values, digest};
use crate::{
    AdapterReport, Backend, Error, FusedMatrix, MergeMode, Norm, Qwen3Config, Result, StepPlan, walk,
};

impl Backend for CpuBackend {
    fn config(&self) -> &Qwen3Config {
        &self.config
    }

    fn kv_layout(&self) -> &KvLayout {
        self.cache.layout()
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        let (tokens, max) = (plan.n_tokens(), self.max_tokens);
        if tokens > max {
            return Err(Error::StepTooLarge { tokens, max });
        }
        let layout = self.cache.layout();
        let (table_pages, table_page_size) = (plan.table().n_pages(), plan.table().page_size());
        if (table_pages, table_page_size) != (layout.n_pages, layout.page_size) {
            let (cache_pages, cache_page_size) = (layout.n_pages, layout.page_size);
            return Err(Error::CacheShape {
                table_pages,
                table_page_size,
                cache_pages,
                cache_page_size,
            });
        }
        self.attention.prepare(plan)?;
        let half = self.config.head_dim / 2;
        let step = &mut self.step;
        replace(&mut step.token_ids, plan.token_ids());
        replace(&mut step.physical, plan.physical());
        replace(&mut step.logit_rows, plan.logit_rows());
        let chunks = plan.chunks().iter();
        self.runtime
            .prepare(chunks.map(|chunk| (chunk.slot.index(), chunk.len)));
        step.cos.resize(tokens * half, 0.0);
        step.sin.resize(tokens * half, 0.0);
        let angles = step
            .cos
            .chunks_exact_mut(half)
            .zip(step.sin.chunks_exact_mut(half));
        for (position, (cos, sin)) in plan.positions().iter().zip(angles) {
            self.rope.cos_sin(*position as usize, cos, sin);
        }
        self.buffers.resize(&self.config, tokens, plan.logit_rows().len());
        Ok(())
    }

    fn embed(&mut self) -> Result<()> {
        let (ids, table) = (&self.step.token_ids, &self.store.source().weights().embed_tokens);
        for_rows(&mut self.buffers.residual, self.config.hidden_size, |row, to| {
            widen(to, table.row(ids[row] as usize));
        });
        Ok(())
    }

    fn rms_norm(&mut self, layer: usize, norm: Norm) -> Result<()> {
        let (hidden, eps) = (self.config.hidden_size, self.rms_norm_eps());
        let weights = &self.store.source().weights().layers[layer];
        let weight = match norm {
            Norm::Attention => &weights.input_norm,
            Norm::Mlp => &weights.post_attention_norm,
        };
        let Buffers {
            residual,
            normed,
            delta,
            ..
        } = &mut self.buffers;
        if (layer, norm) != (0, Norm::Attention) {
            for_rows(residual, hidden, |row, to| {
                add(to, &delta[row * hidden..][..hidden])
            });
        }
        for_rows(normed, hidden, |row, to| {
            rms_norm(to, &residual[row * hidden..][..hidden], weight, eps)
        });
        Ok(())
    }

    fn project(&mut self, layer: usize, matrix: FusedMatrix) -> Result<()> {
        let Buffers {
            normed,
            qkv,
            mixed,
            delta,
            gate_up,
            gated,
            split,
            scratch,
            ..
        } = &mut self.buffers;
        let (input, output) = match matrix {
            FusedMatrix::Qkv => (normed, qkv),
            FusedMatrix::O => (mixed, delta),
            FusedMatrix::GateUp => (normed, gate_up),
            FusedMatrix::Down => (gated, delta),
        };
        let cols = input.len() / self.step.token_ids.len();
        let (store, runtime) = (&self.store, &self.runtime);
        let part = |i: usize| match matrix.parts().get(i) {
            Some(projection) => served(store, runtime, module_index(layer, *projection)),
            None => Matrix::Bf16(&[]),
        };
        split.set(input, cols);
        matmul(&[part(0), part(1), part(2)], split, scratch, output);
        let stride = output.len() / self.step.token_ids.len();
        let mut first = 0;
        for &projection in matrix.parts() {
            let size = self.config.projection_shape(projection)[0];
            let columns = Columns { stride, first, size };
            let module = module_index(layer, projection);
            complete(store, runtime, module, input, output, columns, |row| row);
            first += size;
        }
        Ok(())
    }

    fn qk_norm_rope_write(&mut self, layer: usize) -> Result<()> {
        let eps = self.rms_norm_eps();
        let (head_dim, half) = (self.config.head_dim, self.config.head_dim / 2);
        let (q_size, kv_size, qkv_size) = (
            self.config.q_size(),
            self.config.kv_size(),
            self.config.qkv_size(),
        );
        let weights = &self.store.source().weights().layers[layer];
        let Step {
            cos, sin, physical, ..
        } = &self.step;
        let Buffers {
            qkv, keys, values, ..
        } = &mut self.buffers;
        for_rows(qkv, qkv_size, |row, qkv| {
            let (cos, sin) = (&cos[row * half..][..half], &sin[row * half..][..half]);
            let (queries, rest) = qkv.split_at_mut(q_size);
            for head in queries.chunks_exact_mut(head_dim) {
                norm_rope(head, &weights.q_norm, eps, cos, sin);
            }
            for head in rest[..kv_size].chunks_exact_mut(head_dim) {
                norm_rope(head, &weights.k_norm, eps, cos, sin);
            }
        });
        for (row, qkv) in qkv.chunks_exact(qkv_size).enumerate() {
            let (key, value) = qkv[q_size..].split_at(kv_size);
            keys[row * kv_size..][..kv_size].copy_from_slice(key);
            values[row * kv_size..][..kv_size].copy_from_slice(value);
        }
        self.cache.write(layer, physical, keys, values)?;
        Ok(())
    }

    fn attention(&mut self, layer: usize) -> Result<()> {
        let view = self.cache.layer(layer)?;
        self.attention
            .run(&self.config, &self.buffers.qkv, view, &mut self.buffers.mixed)
    }

    fn silu_mul(&mut self) -> Result<()> {
        let size = self.config.intermediate_size;
        let gate_up = &self.buffers.gate_up;
        for_rows(&mut self.buffers.gated, size, |row, to| {
            let (gate, up) = gate_up[row * 2 * size..][..2 * size].split_at(size);
            silu_mul(to, gate, up);
        });
        Ok(())
    }

    fn logits(&mut self) -> Result<()> {
        let wanted = self.step.logit_rows.len();
        if wanted == 0 {
            return Ok(());
        }
        let (hidden, eps) = (self.config.hidden_size, self.rms_norm_eps());
        let Buffers {
            residual,
            normed,
            delta,
            split,
            scratch,
            logits,
            ..
        } = &mut self.buffers;
        let normed = &mut normed[..wanted * hidden];
        for (to, &row) in normed.chunks_exact_mut(hidden).zip(&self.step.logit_rows) {
            let place = row as usize * hidden..(row as usize + 1) * hidden;
            add(&mut residual[place.clone()], &delta[place.clone()]);
            rms_norm(to, &residual[place], &self.store.source().weights().norm, eps);
        }
        split.set(normed, hidden);
        let (module, size) = (self.store.specs().len() - 1, self.config.vocab_size);
        matmul(
            &[served(&self.store, &self.runtime, module)],
            split,
            scratch,
            logits,
        );
        let columns = Columns {
            stride: size,
            first: 0,
            size,
        };
        let rows = &self.step.logit_rows;
        let row_of = |row: usize| rows[row] as usize;
        complete(
            &self.store,
            &self.runtime,
            module,
            normed,
            logits,
            columns,
            row_of,
        );
        Ok(())
    }

    fn step(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        // From within rayon's pool each parallel operation saves the hand-over to it.
        rayon::scope(|_| {
            self.prepare(plan)?;
            walk(self)
        })
    }

    fn read_logits(&mut self) -> Result<&[f32]> {
        Ok(&self.buffers.logits)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<()> {
        Ok(self.cache.copy_pages(copies)?)
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<AdapterReport> {
        let start = Instant::now();
        let resolved = self.store.resolve(active)?;
        match mode {
            MergeMode::Merged => self.change(active, RuntimePolicies::default(), &[resolved], mode, start),
            MergeMode::Unmerged => {
                let resolved = [resolved];
                let runtime = RuntimePolicies::new(&resolved, self.store.specs(), self.weights());
                self.change(
                    &[],
                    runtime.map_err(Error::without_policy)?,
                    &resolved,
                    mode,
                    start,
                )
            }
        }
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<AdapterReport> {
        let start = Instant::now();
        let mut resolved = Vec::with_capacity(policies.len());
        for (policy, active) in policies.iter().enumerate() {
            let failed = |source| Error::Policy { policy, source };
            let one = self.store.resolve(active).map_err(failed)?;
            let whole =
                |update: &Option<ModuleUpdate>| update.as_ref().is_some_and(|u| u.replacement().is_some());
            if let Some(module) = one.updates().iter().position(whole) {
                return Err(failed(lora_merge::Error::Module {
                    module: self.store.specs()[module].name.clone(),
                    field: "modules_to_save",
                    reason: "a whole module cannot be replaced for one of several policies; merge the adapter",
                }));
            }
            resolved.push(one);
        }
        let runtime = RuntimePolicies::new(&resolved, self.store.specs(), self.weights())?;
        self.change(&[], runtime, &resolved, MergeMode::Unmerged, start)
    }

    fn set_slot_policy(&mut self, slot: usize, policy: Option<usize>) -> Result<()> {
        self.runtime.set_slot(slot, policy)
    }

    fn policy(&self) -> PolicyVersion {
        self.version
    }

    fn base_sha256(&mut self) -> Result<[u8; 32]> {
        let this = &*self;
        digest(&self.config, |parameter| {
            Ok(match parameter {
                Parameter::Weight(module) => this.matrix(module, this.store.source().slice(module)),
                other => this.other_parameter(other),
            })
        })
    }

    fn served_sha256(&mut self) -> Result<[u8; 32]> {
        let this = &*self;
        digest(&self.config, |parameter| {
            Ok(match parameter {
                Parameter::Weight(module) => this.matrix(module, this.store.weight(module)),
                Parameter::Bias(module) => match this.store.bias(module) {
                    Some(bias) => Values::Bias(Cow::Borrowed(bias)),
                    None => Values::Absent,
                },
                other => this.other_parameter(other),
            })
        })
    }
}

fn replace<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}
