//! The operations of the layer walk on the GPU: each takes its slices of the workspace for the rows of
//! the present step and gives one or two launches to the stream.

use std::ops::Range;

use cuda_graphs::MatmulDims;
use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::{KvLayout, PageCopy};

use super::attention::Operands;
use super::inputs::SampledBy;
use super::profile::Stage;
use super::weights::fused_shape;
use super::{CudaBackend, Rows};
use crate::launch::{Product, QkvRopeWrite, RmsNorm, Sample, SampleRow, TokenSource};
use crate::{AdapterReport, Backend, Error, FusedMatrix, MergeMode, Norm, Qwen3Config, Result, StepPlan};

impl CudaBackend {
    pub(super) fn n_rows(&self) -> usize {
        match self.rows {
            Rows::Packed { tokens, .. } => tokens,
            Rows::Decode { bucket } => bucket,
        }
    }

    /// Final norm and head of the wanted rows `from..to`, into the first rows of `logits`.
    fn head(&self, from: usize, to: usize) -> Result<()> {
        let (hidden, vocab, rows, n) = (
            self.config.hidden_size,
            self.config.vocab_size,
            self.n_rows(),
            to - from,
        );
        let row_index = match self.rows {
            Rows::Packed { .. } => Some(self.packed.logit_rows.slice(from..to)?),
            Rows::Decode { .. } => None,
        };
        let w = &self.workspace;
        let out = w.normed.slice(..n * hidden)?;
        // Rows too many hold anything; nothing of theirs is read.
        let m = self.matmul.padded_rows(n);
        self.kernels.rms_norm(
            &self.stream,
            &RmsNorm {
                residual: w.residual.slice(..rows * hidden)?,
                // Kernels with the residual sum inside have added it already.
                delta: match self.in_four_bit_layers() || self.wide_served().down.is_ours() {
                    true => None,
                    false => Some(w.delta.slice(..rows * hidden)?),
                },
                weight: self.weights.norm.as_slice(),
                row_index,
                out,
                eps: self.config.rms_norm_eps as f32,
            },
        )?;
        let dims = MatmulDims {
            m,
            n: vocab,
            k: hidden,
        };
        let logits = w.logits.slice(..n * vocab)?;
        self.matmul.multiply(
            dims,
            w.normed.slice(..m * hidden)?,
            self.weights.head(),
            w.logits.slice(..m * vocab)?,
            None,
        )?;
        if let Some(bias) = self.weights.head_bias() {
            self.kernels
                .add_bias(&self.stream, Product::F32(logits), bias.as_slice(), n)?;
        }
        self.add_unmerged_head(from..to)
    }

    /// Token, log-probabilities and the next step's state of the first `rows` rows of logits.
    pub(super) fn sample(&mut self, by: SampledBy, rows: usize) -> Result<()> {
        if self.skips(Stage::Sample) {
            return Ok(());
        }
        let (slots, positions, sample_rows) = match by {
            SampledBy::Packed => (
                self.packed.logit_slots.slice(..rows)?,
                None,
                self.packed.sample_rows.slice(..rows * SampleRow::WORDS)?,
            ),
            SampledBy::Decode => (
                self.decode.slots(rows)?,
                Some(self.decode.positions(rows)?),
                self.decode.sample_rows(rows)?,
            ),
        };
        let vocab = self.config.vocab_size;
        self.kernels.sample(
            &self.stream,
            &Sample {
                logits: self.workspace.logits.slice(..rows * vocab)?,
                vocab,
                scratch: &self.workspace.sample,
                rows: sample_rows,
                slots,
                states: self.token_states.as_slice(),
                last_token: self.last_token.as_slice(),
                positions,
                tokens: self.sampled.tokens(by, rows)?,
                logprobs: self.sampled.logprobs(by, rows)?,
                sampled_logprobs: self.sampled.sampled_logprobs(by, rows)?,
                top: self.sampled.top(by, rows)?,
            },
        )
    }

    /// What becomes of the QKV product of the present rows.
    pub(super) fn rope_write(&self, layer: usize) -> Result<QkvRopeWrite<'_>> {
        let rows = self.n_rows();
        let (positions, slots) = match self.rows {
            Rows::Packed { tokens, .. } => (
                self.packed.positions.slice(..tokens)?,
                self.packed.slots.slice(..tokens)?,
            ),
            Rows::Decode { bucket } => (self.decode.positions(bucket)?, self.decode.slots(bucket)?),
        };
        let (config, weights) = (&self.config, &self.weights.layers[layer]);
        Ok(QkvRopeWrite {
            qkv: self.workspace.qkv.slice(..rows * config.qkv_size())?,
            q_norm: weights.q_norm.as_slice(),
            k_norm: weights.k_norm.as_slice(),
            cos_sin: self.cos_sin.as_slice(),
            positions,
            slots,
            page_table: self.mirror.rows(),
            max_pages: self.mirror.max_pages_per_slot(),
            k_cache: self.cache.keys(layer)?,
            v_cache: self.cache.values(layer)?,
            q_heads: config.n_heads,
            kv_heads: config.n_kv_heads,
            page_size: self.options.page_size,
            eps: config.rms_norm_eps as f32,
        })
    }

    /// Whether norms, SiLU and residual sums are part of the products.
    fn in_any_layers(&self) -> bool {
        self.in_layers() || self.in_four_bit_layers()
    }

    /// Whether a profile run leaves this stage out.
    fn skips(&self, stage: Stage) -> bool {
        self.only.is_some_and(|only| only != stage)
    }
}

impl Backend for CudaBackend {
    fn config(&self) -> &Qwen3Config {
        &self.config
    }

    fn kv_layout(&self) -> &KvLayout {
        self.cache.layout()
    }

    fn max_tokens(&self) -> usize {
        self.options.max_tokens
    }

    fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        let (tokens, max) = (plan.n_tokens(), self.options.max_tokens);
        if tokens > max {
            return Err(Error::StepTooLarge { tokens, max });
        }
        let table = plan.table();
        let layout = self.cache.layout();
        if (table.n_pages(), table.page_size()) != (layout.n_pages, layout.page_size) {
            return Err(Error::CacheShape {
                table_pages: table.n_pages(),
                table_page_size: table.page_size(),
                cache_pages: layout.n_pages,
                cache_page_size: layout.page_size,
            });
        }
        if !std::mem::take(&mut self.mirrored) {
            // Nobody but us follows the table, so its dirty rows are all that ever changed: a copy of it may be drained.
            self.mirror.update(&self.stream, &mut table.clone())?;
        }
        self.staging.begin()?;
        self.packed.upload(&self.stream, &mut self.staging, plan)?;
        let continued = self.continued;
        self.attention.prepare(&self.stream, plan, continued)?;
        self.staging.end(&self.stream)?;
        if continued > 0 {
            let decoding = tokens - continued..tokens;
            let slots = self.packed.slots.slice(decoding.clone())?;
            let positions = self.packed.positions.slice(decoding)?;
            let table = self.mirror.rows();
            self.attention
                .plan_decode(&self.stream, slots, positions, table)?;
        }
        self.rows = Rows::Packed {
            tokens,
            wanted: plan.logit_rows().len(),
            continued,
        };
        Ok(())
    }

    fn embed(&mut self) -> Result<()> {
        if self.skips(Stage::Embed) {
            return Ok(());
        }
        let hidden = self.config.hidden_size;
        let embed = |rows: Range<usize>, from: TokenSource<'_>| match rows.is_empty() {
            true => Ok(()),
            false => {
                let residual = self
                    .workspace
                    .residual
                    .slice(rows.start * hidden..rows.end * hidden)?;
                self.kernels
                    .embed(&self.stream, self.weights.embed.as_slice(), from, residual)
            }
        };
        let last_token = self.last_token.as_slice();
        match self.rows {
            Rows::Packed {
                tokens, continued, ..
            } => {
                let given = tokens - continued;
                embed(0..given, TokenSource::Ids(self.packed.token_ids.slice(..given)?))?;
                let slots = self.packed.slots.slice(given..tokens)?;
                embed(given..tokens, TokenSource::Last { slots, last_token })
            }
            Rows::Decode { bucket } => {
                // The list of attention's work is the same for all layers.
                let (slots, positions) = (self.decode.slots(bucket)?, self.decode.positions(bucket)?);
                if !self.in_layers() {
                    let table = self.mirror.rows();
                    self.attention
                        .plan_decode(&self.stream, slots, positions, table)?;
                }
                embed(0..bucket, TokenSource::Last { slots, last_token })
            }
        }
    }

    fn rms_norm(&mut self, layer: usize, norm: Norm) -> Result<()> {
        let served = self.wide_served();
        let inside = self.in_any_layers()
            || match norm {
                Norm::Attention => served.down.is_ours(),
                Norm::Mlp => served.o.is_ours(),
            };
        if self.skips(Stage::Norm) || (inside && (layer, norm) != (0, Norm::Attention)) {
            return Ok(());
        }
        let elements = self.n_rows() * self.config.hidden_size;
        let weights = &self.weights.layers[layer];
        let weight = match norm {
            Norm::Attention => &weights.input_norm,
            Norm::Mlp => &weights.post_attention_norm,
        };
        let delta = match (layer, norm) {
            (0, Norm::Attention) => None,
            _ => Some(self.workspace.delta.slice(..elements)?),
        };
        self.kernels.rms_norm(
            &self.stream,
            &RmsNorm {
                residual: self.workspace.residual.slice(..elements)?,
                delta,
                weight: weight.as_slice(),
                row_index: None,
                out: self.workspace.normed.slice(..elements)?,
                eps: self.config.rms_norm_eps as f32,
            },
        )
    }

    fn project(&mut self, layer: usize, matrix: FusedMatrix) -> Result<()> {
        if self.in_four_bit_layers() {
            let stage = match matrix {
                FusedMatrix::O => Stage::Layer,
                matrix => Stage::of(matrix),
            };
            return match self.skips(stage) {
                true => Ok(()),
                false => self.project_in_four_bit_layers(layer, matrix),
            };
        }
        if self.in_layers() {
            return match (layer, matrix) {
                (0, FusedMatrix::Qkv) if !self.skips(Stage::Layer) => self.all_layers(),
                _ => Ok(()),
            };
        }
        if self.skips(Stage::of(matrix)) {
            return Ok(());
        }
        if let Some((wide, rows, served)) = self.wide()
            && served.has(matrix)
        {
            return self.wide_project(wide, rows, served, layer, matrix);
        }
        if self.project_four_bit(layer, matrix)? {
            return Ok(());
        }
        if let Some((kernel, rows)) = self.whole_product(matrix) {
            return self.project_whole(kernel, layer, matrix, rows);
        }
        let m = self.matmul.padded_rows(self.n_rows());
        let [n, k] = fused_shape(&self.config, matrix);
        let dims = MatmulDims { m, n, k };
        let weight = self.weights.layers[layer].matrix(matrix);
        let w = &self.workspace;
        match matrix {
            FusedMatrix::Qkv => self.matmul.multiply(
                dims,
                w.normed.slice(..m * k)?,
                weight,
                w.qkv.slice(..m * n)?,
                None,
            )?,
            FusedMatrix::O => self.matmul.multiply(
                dims,
                w.mixed.slice(..m * k)?,
                weight,
                w.delta.slice(..m * n)?,
                None,
            )?,
            FusedMatrix::GateUp => {
                self.matmul.multiply(
                    dims,
                    w.normed.slice(..m * k)?,
                    weight,
                    w.gate_up.slice(..m * n)?,
                    None,
                )?;
            }
            FusedMatrix::Down => self.matmul.multiply(
                dims,
                w.gated.slice(..m * k)?,
                weight,
                w.delta.slice(..m * n)?,
                None,
            )?,
        }
        if let Some(bias) = self.weights.layers[layer].bias(matrix) {
            let product = match matrix {
                FusedMatrix::Qkv => Product::Bf16(w.qkv.slice(..m * n)?),
                FusedMatrix::GateUp => Product::Bf16(w.gate_up.slice(..m * n)?),
                FusedMatrix::O | FusedMatrix::Down => Product::F32(w.delta.slice(..m * n)?),
            };
            self.kernels.add_bias(&self.stream, product, bias.as_slice(), m)?;
        }
        self.add_unmerged(layer, matrix)
    }

    fn qk_norm_rope_write(&mut self, layer: usize) -> Result<()> {
        if self.skips(Stage::Rope) || self.in_layers() || self.in_wide_qkv() {
            return Ok(());
        }
        self.kernels.qkv_rope_write(
            &self.stream,
            &self.rope_write(layer)?,
            self.wide_row_scale(layer)?.as_ref(),
        )
    }

    fn attention(&mut self, layer: usize) -> Result<()> {
        if self.skips(Stage::Attention) || self.in_layers() {
            return Ok(());
        }
        let rows = self.n_rows();
        let operands = Operands {
            qkv: self.workspace.qkv.slice(..rows * self.config.qkv_size())?,
            k: self.cache.keys(layer)?,
            v: self.cache.values(layer)?,
            page_table: self.mirror.rows(),
            out: self.workspace.mixed.slice(..rows * self.config.q_size())?,
        };
        match self.rows {
            Rows::Packed {
                tokens, continued, ..
            } => {
                let (config, given) = (&self.config, tokens - continued);
                let rows = [
                    self.packed.slots.slice(..given)?,
                    self.packed.positions.slice(..given)?,
                ];
                self.attention.packed(&self.stream, &operands, rows, layer == 0)?;
                if continued == 0 {
                    return Ok(());
                }
                let decoding = Operands {
                    qkv: operands.qkv.slice(given * config.qkv_size()..)?,
                    out: operands.out.slice(given * config.q_size()..)?,
                    ..operands
                };
                self.attention.decode(&self.stream, continued, &decoding, false)
            }
            // A decode step writes its newest tokens to the cache and nothing else. Before the second layer's attention begins the
            // first one's has waited for the plan.
            Rows::Decode { bucket } => self.attention.decode(&self.stream, bucket, &operands, layer > 0),
        }
    }

    fn silu_mul(&mut self) -> Result<()> {
        let gated = self.wide_served().gate_up || self.whole_product(FusedMatrix::GateUp).is_some();
        let inside = self.in_any_layers() || gated;
        if self.skips(Stage::SiluMul) || inside {
            return Ok(());
        }
        let (rows, inner) = (self.n_rows(), self.config.intermediate_size);
        let gate_up = self.workspace.gate_up.slice(..rows * 2 * inner)?;
        self.kernels.silu_mul(
            &self.stream,
            gate_up,
            self.workspace.gated.slice(..rows * inner)?,
            rows,
        )
    }

    fn logits(&mut self) -> Result<()> {
        if self.skips(Stage::Head) || self.in_layers() {
            self.host_logits.clear();
            return Ok(());
        }
        let (wanted, room) = match self.rows {
            Rows::Packed { wanted, .. } => (wanted, self.workspace.logit_rows),
            Rows::Decode { bucket } => (bucket, self.workspace.logit_rows),
        };
        self.host_logits.clear();
        if let Some((wide, rows, served)) = self.wide()
            && served.head
        {
            return self.wide_head(wide, rows, served);
        }
        if wanted <= room {
            return if wanted > 0 { self.head(0, wanted) } else { Ok(()) };
        }
        // More than fit, as in teacher forcing: piece by piece, through the host.
        let vocab = self.config.vocab_size;
        self.host_logits.resize(wanted * vocab, 0.0);
        for from in (0..wanted).step_by(room) {
            let to = (from + room).min(wanted);
            self.head(from, to)?;
            let logits = self.workspace.logits.slice(..(to - from) * vocab)?;
            self.stream
                .download_into(&mut self.host_logits[from * vocab..to * vocab], logits)?;
        }
        Ok(())
    }

    fn read_logits(&mut self) -> Result<&[f32]> {
        let wanted = match self.rows {
            Rows::Packed { wanted, .. } => wanted,
            Rows::Decode { bucket } => bucket,
        };
        if self.host_logits.is_empty() && wanted > 0 {
            let logits = self.workspace.logits.slice(..wanted * self.config.vocab_size)?;
            self.host_logits = self.stream.download(logits)?;
        }
        Ok(&self.host_logits)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<()> {
        Ok(self.cache.copy_pages(&self.stream, copies)?)
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<AdapterReport> {
        match mode {
            MergeMode::Merged => self.merge_adapters(active, mode),
            MergeMode::Unmerged => self.serve_policies(&[active]).map_err(Error::without_policy),
        }
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<AdapterReport> {
        // The inherent method.
        Self::serve_policies(self, policies)
    }

    fn set_slot_policy(&mut self, slot: usize, policy: Option<usize>) -> Result<()> {
        Self::set_slot_policy(self, slot, policy)
    }

    fn policy(&self) -> PolicyVersion {
        self.policy_in_force()
    }

    fn base_sha256(&mut self) -> Result<[u8; 32]> {
        self.sha256(false)
    }

    fn served_sha256(&mut self) -> Result<[u8; 32]> {
        self.sha256(true)
    }
}
