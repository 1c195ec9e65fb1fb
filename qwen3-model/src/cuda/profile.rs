//! Where the time of a decode step goes, and how fast the device multiplies.
//!
//! Each kind of operation is captured alone, over all layers, and its graph replayed between two
//! events: what it costs in a graph, kernel boundaries included, without the gaps that launching
//! kernels one by one would add.

use cuda_graphs::{Capture, DeviceBuffer, Event, MatmulDims};
use half::bf16;

use super::{CudaBackend, DecodeRow};
use crate::{Error, FusedMatrix, Result, random};

/// Replays that are timed, of which the median counts.
const REPLAYS: usize = 15;

/// Products that are timed together.
const PRODUCTS: usize = 4;

/// A kind of operation of the layer walk.
///
/// ```no_run
/// use qwen3_model::cuda::{CudaBackend, DecodeRow, Stage, StageTime};
///
/// # fn profile(mut backend: CudaBackend) -> qwen3_model::Result<()> {
/// for StageTime { stage, ms, nodes } in backend.profile_decode(&[DecodeRow::greedy(1, 100)])? {
///     println!("{} {ms} ms in {nodes} nodes", stage.map_or("all", Stage::name));
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// Embedding, and the work list of attention.
    Embed,
    /// Residual add and norm, two per layer.
    Norm,
    /// Fused query, key and value product.
    Qkv,
    /// q/k norm, rotary embedding, cache write.
    Rope,
    /// Attention.
    Attention,
    /// Output product of attention.
    O,
    /// Fused gate and up product.
    GateUp,
    /// SiLU and product of gate and up.
    SiluMul,
    /// Down product.
    Down,
    /// All layers and the head, where one kernel does them.
    Layer,
    /// Final norm and output head.
    Head,
    /// Choice of tokens, and log-probabilities.
    Sample,
}

impl Stage {
    /// All, in the order of the walk.
    pub const ALL: [Self; 12] = [
        Self::Embed,
        Self::Norm,
        Self::Qkv,
        Self::Rope,
        Self::Attention,
        Self::O,
        Self::GateUp,
        Self::SiluMul,
        Self::Down,
        Self::Layer,
        Self::Head,
        Self::Sample,
    ];

    pub(super) fn of(matrix: FusedMatrix) -> Self {
        match matrix {
            FusedMatrix::Qkv => Self::Qkv,
            FusedMatrix::O => Self::O,
            FusedMatrix::GateUp => Self::GateUp,
            FusedMatrix::Down => Self::Down,
        }
    }

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Norm => "norm",
            Self::Qkv => "qkv",
            Self::Rope => "rope_write",
            Self::Attention => "attention",
            Self::O => "o",
            Self::GateUp => "gate_up",
            Self::SiluMul => "silu_mul",
            Self::Down => "down",
            Self::Layer => "layer",
            Self::Head => "head",
            Self::Sample => "sample",
        }
    }
}

/// Time of one kind of operation in a decode step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTime {
    /// The kind; `None` is the whole step.
    pub stage: Option<Stage>,
    /// Milliseconds in a step, all layers together.
    pub ms: f64,
    /// Nodes of its graph.
    pub nodes: usize,
}

impl CudaBackend {
    /// Times the whole decode step of `rows` and each of its stages. The pages of the rows must be mapped, and what
    /// they hold at the rows' positions, and the tokens sampled last, are lost. Waits.
    ///
    /// # Errors
    /// As [`decode`](Self::decode). Panics: none.
    pub fn profile_decode(&mut self, rows: &[DecodeRow]) -> Result<Vec<StageTime>> {
        let stages: Vec<_> = std::iter::once(None)
            .chain(Stage::ALL.into_iter().map(Some))
            .collect();
        self.profile_stages(rows, &stages)
    }

    /// As [`profile_decode`](Self::profile_decode), for these stages alone; `None` is the whole step. A replay moves the
    /// rows on by a position, at most 20 altogether.
    ///
    /// # Errors
    /// As [`decode`](Self::decode). Panics: none.
    pub fn profile_stages(&mut self, rows: &[DecodeRow], stages: &[Option<Stage>]) -> Result<Vec<StageTime>> {
        let mut times = Vec::new();
        for &stage in stages {
            // Attention reads the work list that the embedding stage makes; sampling moves positions on.
            self.decode.forget();
            let bucket = self.set_decode_rows(rows)?;
            if bucket == 0 {
                let problem = "a profile needs at least one row".into();
                return Err(Error::Option {
                    option: "rows",
                    problem,
                });
            }
            self.run_decode(bucket)?;
            self.decode.forget();
            self.set_decode_rows(rows)?;
            self.only = stage;
            let timed = self.time_stage(bucket);
            self.only = None;
            let (ms, nodes) = timed?;
            times.push(StageTime { stage, ms, nodes });
        }
        self.decode.forget();
        Ok(times)
    }

    /// Writes random numbers into all pages of the KV cache: contexts of any length to measure with, without their
    /// prompts. Queued.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::CudaCache`]. Panics: none.
    pub fn fill_cache_random(&mut self, seed: u64) -> Result<()> {
        let quantiles = DeviceBuffer::from_slice(&self.stream, random::quantiles().as_slice())?;
        for layer in 0..self.config.n_layers {
            let halves = [
                ("keys", self.cache.keys(layer)?),
                ("values", self.cache.values(layer)?),
            ];
            for (what, half) in halves {
                let sequence = random::stream(seed, &format!("{what} {layer}"));
                self.kernels
                    .random_matrix(&self.stream, half, &quantiles, sequence)?;
            }
        }
        // Before the table is freed.
        Ok(self.stream.synchronize()?)
    }

    fn time_stage(&mut self, bucket: usize) -> Result<(f64, usize)> {
        let stream = self.stream.clone();
        let graph = Capture::record(&stream, |_| self.run_decode(bucket))?;
        let device = stream.device();
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        graph.launch(&stream)?;
        let mut times = Vec::with_capacity(REPLAYS);
        for _ in 0..REPLAYS {
            stream.record(&start)?;
            graph.launch(&stream)?;
            stream.record(&end)?;
            times.push(f64::from(start.elapsed_ms(&end)?));
        }
        times.sort_by(f64::total_cmp);
        Ok((times[REPLAYS / 2], graph.nodes()))
    }

    /// Floating-point operations per second of a product of random bf16 matrices of `[n, n]`, on the stream and with the
    /// algorithms of the model's own products, the best of some runs: what a prefill can be held against. Takes `6 n²` bytes meanwhile. Waits.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for too little memory. Panics: none.
    pub fn matrix_rate(&self, n: usize) -> Result<f64> {
        let (stream, device) = (&self.stream, self.stream.device());
        let quantiles = DeviceBuffer::from_slice(stream, random::quantiles().as_slice())?;
        let [x, w, y] = [(); 3].map(|()| DeviceBuffer::<bf16>::zeroed(device, n * n));
        let (x, w, y) = (x?, w?, y?);
        for (matrix, number) in [(&x, 1), (&w, 2)] {
            self.kernels
                .random_matrix(stream, matrix.as_slice(), &quantiles, number)?;
        }
        let dims = MatmulDims { m: n, n, k: n };
        let multiply = || self.matmul.multiply(dims, &x, &w, &y, None);
        // Chooses an algorithm.
        multiply()?;
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        let mut best = f64::INFINITY;
        for _ in 0..REPLAYS {
            stream.record(&start)?;
            for _ in 0..PRODUCTS {
                multiply()?;
            }
            stream.record(&end)?;
            best = best.min(f64::from(start.elapsed_ms(&end)?) / 1e3);
        }
        Ok(2.0 * (n as f64).powi(3) * PRODUCTS as f64 / best)
    }
}
