//! What a device must be able to do to run the model, and the one walk over the layers.
//!
//! A [`Backend`] owns its weights, its KV cache and a workspace of named buffers; operations are
//! steps between those buffers, fused as far as a kernel would fuse them. Nothing is passed from
//! one operation to the next but the buffers, and nothing but [`Backend::prepare`] looks at the
//! step, so that the same walk can be captured once and replayed.
//!
//! ```text
//!              ┌──────────────── residual [rows, hidden] ◀── += ──────────────┐
//!   embed ─────┘     │ rms_norm(Attention)                                    │
//!                    ▼                                                        │
//!                  normed ── Qkv ──▶ qkv [rows, q + k + v]                    │
//!                                     │ qk_norm_rope_write ──▶ KV cache       │
//!                                     ▼                           │           │
//!                                   attention ◀───────────────────┘           │
//!                                     ▼                                       │
//!                                   mixed [rows, q] ── O ──▶ delta [rows, hidden]
//!                    rms_norm(Mlp): residual += delta                         │
//!                    ▼                                                        │
//!                  normed ── GateUp ──▶ gate_up ── silu_mul ──▶ gated ── Down ┘
//!
//!   logits: wanted rows of residual + delta, final norm, head ──▶ logits [wanted, vocab] f32
//! ```
//!
//! A product leaves its result in `delta` and the *next* norm adds it to the residual: that is the
//! fusion that saves a pass over memory. The first norm of layer 0 has nothing to add.

use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::{KvLayout, PageCopy};

use crate::{AdapterReport, Error, FusedMatrix, MergeMode, Qwen3Config, Result, StepPlan};

/// The two norms of a layer.
///
/// ```
/// use qwen3_model::Norm;
///
/// assert_ne!(Norm::Attention, Norm::Mlp);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// `input_layernorm`, before attention.
    Attention,
    /// `post_attention_layernorm`, before the MLP.
    Mlp,
}

/// A device with a model's weights, its KV cache and the buffers of a step.
///
/// Buffers are named in the [module's drawing](self). Every operation works on the rows of the
/// step that [`prepare`](Backend::prepare) announced, in the order of [`walk`]; a device may
/// queue them.
///
/// ```
/// use qwen3_model::{Backend, CpuBackend, LoadOptions, Qwen3Config, Weights};
///
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout-engine/models/tiny-qwen3-math");
/// let config = Qwen3Config::from_dir(dir.as_ref())?;
/// let weights = Weights::open(dir.as_ref(), &config)?;
/// let backend = CpuBackend::new(config, weights, &LoadOptions::default())?;
/// assert_eq!(backend.kv_layout().n_layers, backend.config().n_layers);
/// # Ok::<(), qwen3_model::Error>(())
/// ```
pub trait Backend {
    /// The model's shape.
    fn config(&self) -> &Qwen3Config;

    /// Shape of the KV cache.
    fn kv_layout(&self) -> &KvLayout;

    /// Most tokens that one step may hold.
    fn max_tokens(&self) -> usize;

    /// Takes over what differs from step to step: token ids, positions, cache rows, the mask,
    /// wanted rows. The only operation that reads host data.
    ///
    /// # Errors
    /// [`Error::StepTooLarge`],
    /// [`Error::CacheShape`], errors of the device.
    fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<()>;

    /// `residual = embedding[token_ids]`.
    fn embed(&mut self) -> Result<()>;

    /// `residual += delta` (except before layer 0), then `normed = rms_norm(residual) * weight`.
    fn rms_norm(&mut self, layer: usize, norm: Norm) -> Result<()>;

    /// A product with its input and output buffers: `Qkv` normed → qkv, `O` mixed → delta,
    /// `GateUp` normed → gate_up, `Down` gated → delta. Adapters that are not merged are added
    /// here.
    fn project(&mut self, layer: usize, matrix: FusedMatrix) -> Result<()>;

    /// Norm of every query and key head, rotary embedding, and the write of keys and values into
    /// the cache; queries stay in qkv.
    fn qk_norm_rope_write(&mut self, layer: usize) -> Result<()>;

    /// `mixed = softmax(q · kᵀ / √head_dim) · v` over each row's own sequence up to its position.
    fn attention(&mut self, layer: usize) -> Result<()>;

    /// `gated = silu(gate) * up`.
    fn silu_mul(&mut self) -> Result<()>;

    /// For the wanted rows: `residual + delta`, final norm, head. Without wanted rows nothing.
    fn logits(&mut self) -> Result<()>;

    /// Runs one whole step. The default prepares and walks; a backend that replays a captured
    /// graph or runs one kernel for the whole step does so here.
    ///
    /// # Errors
    /// Those of the operations.
    fn step(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        self.prepare(plan)?;
        walk(self)
    }

    /// Logits of the last step, `[wanted rows, vocab]`, once they are there.
    ///
    /// # Errors
    /// Errors of the device.
    fn read_logits(&mut self) -> Result<&[f32]>;

    /// Copies pages of the cache in all layers, in order.
    ///
    /// # Errors
    /// A page outside the cache; errors of the device.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<()>;

    /// Makes `active` the adapters in force, replacing those before; none is the base model.
    /// What the cache holds was computed under the previous policy: whether it may be used on is
    /// the caller's to decide.
    ///
    /// # Errors
    /// [`Error::Adapter`], and [`Error::AdapterMode`]
    /// where the backend has no such mode, as in this default. After an error the previous
    /// adapters are fully in force.
    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<AdapterReport> {
        let _ = active;
        Err(Error::AdapterMode {
            backend: std::any::type_name::<Self>(),
            mode,
        })
    }

    /// Serves several policies at once over the base weights, each a set of adapters at run time, in place of all before.
    /// Every sequence is computed under policy 0 until [`set_slot_policy`](Backend::set_slot_policy) says otherwise.
    ///
    /// # Errors
    /// [`Error::Policy`] for an adapter that does not fit, replaces a whole module, or has a factor that the backend's format
    /// cannot hold, and [`Error::AdapterMode`] where the backend cannot, as in this default. After an error the previous
    /// policies are fully in force.
    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<AdapterReport> {
        let _ = policies;
        Err(Error::AdapterMode {
            backend: std::any::type_name::<Self>(),
            mode: MergeMode::Unmerged,
        })
    }

    /// Computes the sequence in `slot` under a policy of [`serve_policies`](Backend::serve_policies) from the next step on,
    /// or under the base (`None`). What the cache holds of the slot must have been computed under the same policy.
    ///
    /// # Errors
    /// [`Error::Option`] for a policy that is not there, and for a slot that the device has no place for (the CPU has one for
    /// any); errors of the device.
    fn set_slot_policy(&mut self, slot: usize, policy: Option<usize>) -> Result<()> {
        let _ = slot;
        match policy {
            None => Ok(()),
            Some(policy) => Err(Error::Option {
                option: "policy",
                problem: format!("is {policy}; no policies are served"),
            }),
        }
    }

    /// The policy in force.
    fn policy(&self) -> PolicyVersion {
        crate::adapters::base_policy()
    }

    /// SHA-256 over all parameters of the base model, sorted by name, each as its name's bytes and then its raw bytes
    /// (matrices and norms bf16). A tied head does not count again.
    ///
    /// # Errors
    /// [`Error::AdapterMode`] where the backend keeps no base apart from what it serves,
    /// as in this default; errors of the device.
    fn base_sha256(&mut self) -> Result<[u8; 32]> {
        Err(Error::AdapterMode {
            backend: std::any::type_name::<Self>(),
            mode: MergeMode::Merged,
        })
    }

    /// The same over the parameters that steps are computed with, biases that adapters made included. Adapters at run
    /// time are not parameters.
    ///
    /// # Errors
    /// As [`base_sha256`](Backend::base_sha256).
    fn served_sha256(&mut self) -> Result<[u8; 32]> {
        self.base_sha256()
    }
}

/// The layers of a Qwen3 model, in order: the one place that knows them.
///
/// # Errors
/// Those of the operations.
pub fn walk<B: Backend + ?Sized>(backend: &mut B) -> Result<()> {
    backend.embed()?;
    for layer in 0..backend.config().n_layers {
        backend.rms_norm(layer, Norm::Attention)?;
        backend.project(layer, FusedMatrix::Qkv)?;
        backend.qk_norm_rope_write(layer)?;
        backend.attention(layer)?;
        backend.project(layer, FusedMatrix::O)?;
        backend.rms_norm(layer, Norm::Mlp)?;
        backend.project(layer, FusedMatrix::GateUp)?;
        backend.silu_mul()?;
        backend.project(layer, FusedMatrix::Down)?;
    }
    backend.logits()
}
