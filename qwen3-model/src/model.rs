use paged_kv::{PageCopy, PageTable};

use crate::{AdapterReport, Backend, LogitRows, MergeMode, Qwen3Config, Result, StepBatch, StepPlanner};
use lora_merge::{ActiveAdapter, ModuleSpec};

/// A Qwen3 model on a backend.
#[derive(Debug)]
pub struct Model<B> {
    backend: B,
    planner: StepPlanner,
}

impl<B: Backend> Model<B> {
    /// A model on a backend that already holds its weights.
    pub fn new(backend: B) -> Self {
        Self {
            backend,
            planner: StepPlanner::new(),
        }
    }

    /// The model's shape.
    pub fn config(&self) -> &Qwen3Config {
        self.backend.config()
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend, for what only it can do.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Runs one step and returns the logits `[wanted, vocab]` (f32, row-major) of the last row of
    /// every chunk that wants them, in the order of the chunks. Keys and values of all rows are in
    /// the cache afterwards; [`PageTable::advance`] is the caller's.
    ///
    /// # Errors
    /// Those of [`StepPlanner::plan`] and of the backend. After an error of the plan nothing has
    /// changed; after one of the backend the cache rows of the step are undefined.
    pub fn forward(&mut self, batch: &StepBatch<'_>, table: &PageTable) -> Result<&[f32]> {
        self.run(batch, table, LogitRows::Wanted)
    }

    /// As [`forward`](Self::forward), with the logits of every row: `[tokens, vocab]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_all(&mut self, batch: &StepBatch<'_>, table: &PageTable) -> Result<&[f32]> {
        self.run(batch, table, LogitRows::All)
    }

    fn run(&mut self, batch: &StepBatch<'_>, table: &PageTable, rows: LogitRows) -> Result<&[f32]> {
        let plan = self.planner.plan(self.backend.config(), batch, table, rows)?;
        self.backend.step(&plan)?;
        self.backend.read_logits()
    }

    /// The matrices that adapters may target.
    pub fn modules(&self) -> Vec<ModuleSpec> {
        crate::modules(self.config())
    }

    /// Makes `active` the adapters in force, replacing those before; none is the base model. Pages
    /// written before hold keys and values of the previous policy.
    ///
    /// # Errors
    /// Those of [`Backend::set_adapters`]; the previous adapters are then fully in force.
    pub fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<AdapterReport> {
        self.backend.set_adapters(active, mode)
    }

    /// Copies cache pages, as [`PageTable::reserve`] asks for when a forked sequence goes on.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<()> {
        self.backend.copy_pages(copies)
    }
}
