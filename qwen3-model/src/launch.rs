//! The kernels of the layer stack and one safe function per kernel.
//!
//! Each function checks every length against the shape before it launches, and the kernels check
//! every index that they read from device memory, so that no content of a buffer can make them
//! reach outside another. The sources in `kernels/` say what each kernel computes.
//!
//! All of them may start before their predecessor in the stream has ended (programmatic dependent
//! launch) and wait for it themselves.

mod batch_rings;
mod cluster_product;
mod decode_layers;

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Compiler, Device, DeviceBuffer, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Module,
    Stream,
};
use half::bf16;

mod four_bit;
mod four_bit_layer;
mod gate_up;
mod qkv_product;
mod rope_write;
mod sample;
mod stage_output;
mod unmerged;
mod wgmma;
mod whole_product;
mod wide_product;

pub use cluster_product::{CLUSTER_ROWS, ClusterProduct, ClusterProductOp};
pub use decode_layers::{
    DecodeLayers, DecodeLayersOp, DecodeLayersScratch, LayerOperands, LayersShape, MAX_BLOCKS, MAX_ROWS,
};
pub use four_bit::{FOUR_BIT_BLOCK, FOUR_BIT_ROWS, FourBitBuffer, FourBitKernels, ProductOutput};
pub use four_bit_layer::{FOUR_BIT_LAYER_ROWS, FourBitLayer, FourBitLayerOp, FourBitStage, MAX_STAGES};
pub use gate_up::{GATE_UP_ROWS, GateUp, GateUpOp};
pub use qkv_product::{QKV_PRODUCT_ROWS, QkvProduct, QkvProductOp};
pub use rope_write::{QkvRopeWrite, RowScale};
pub use sample::{Sample, SampleRow, SampleScratch};
pub use stage_output::StageOutput;
pub use unmerged::{
    LowRankTerm, MAX_PARTS, PartUpdate, RANK_QUANTUM, RowPolicies, Site, UnmergedKernels, UnmergedTables,
};
pub use whole_product::{WholeKind, WholeProduct, WholeProductOp};
pub use wide_product::{WIDE_ALL_KINDS, WIDE_HEAD_DIM, WIDE_ROWS, WideProductOp, WideProducts};

use crate::{Error, Qwen3Config, Result};

/// Largest `hidden_size`: eight vectors of four per thread of the norm.
pub const MAX_HIDDEN: usize = NORM_VECTORS[NORM_VECTORS.len() - 1] * 4 * NORM_THREADS as usize;

const NORM_THREADS: u32 = 256;
/// Vectors per thread that the norm is compiled for.
const NORM_VECTORS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const EMBED_THREADS: u32 = 128;
const ROPE_WARPS: usize = 8;
/// Rows of which a warp takes three heads instead of one; measured on an H200, see docs/performance.md.
const ROPE_THREE_HEADS: std::ops::RangeInclusive<u32> = 129..=256;
const SILU_THREADS: usize = 256;
const RANDOM_THREADS: u32 = 256;
const BIAS_THREADS: usize = 256;
/// Head dimensions that the kernels are compiled for.
pub const HEAD_DIMS: [usize; 2] = [64, 128];

const COMMON: Header = Header::new("common.cuh", include_str!("../kernels/common.cuh"));
const ROPE: Header = Header::new("rope.cuh", include_str!("../kernels/rope.cuh"));
const ROPE_WRITE: Header = Header::new("rope_write.cuh", include_str!("../kernels/rope_write.cuh"));

fn spec(name: impl Into<String>, source: &'static str) -> KernelSpec {
    KernelSpec::new(name.into(), source).headers([COMMON])
}

fn norm_spec(vectors: usize) -> KernelSpec {
    spec(
        format!("rms_norm<{vectors}>"),
        include_str!("../kernels/rms_norm.cu"),
    )
    .define("VECTORS_PER_THREAD", vectors)
    // Two or more blocks of 256 threads per multiprocessor at every width.
    .entry("rms_norm", Limits::registers(128))
}

fn rope_spec(head_dim: usize) -> KernelSpec {
    spec(
        format!("qkv_rope_write<{head_dim}>"),
        include_str!("../kernels/qkv_rope_write.cu"),
    )
    .headers([ROPE, ROPE_WRITE])
    .define("HEAD_DIM", head_dim)
    .entry("qkv_rope_write", Limits::registers(40))
    // 64 in four blocks of a multiprocessor, more in the three of 12.0.
    .entry("qkv_rope_write_three", Limits::registers(80))
}

/// The kernels that do not depend on the model's shape.
fn common_specs() -> [KernelSpec; 4] {
    [
        spec("embed", include_str!("../kernels/embed.cu")).entry("embed", Limits::registers(40)),
        spec("silu_mul", include_str!("../kernels/silu_mul.cu")).entry("silu_mul", Limits::registers(32)),
        spec("random_matrix", include_str!("../kernels/random_matrix.cu"))
            .entry("random_matrix", Limits::registers(40)),
        spec("add_bias", include_str!("../kernels/add_bias.cu"))
            .entry("add_bias_bf16", Limits::registers(32))
            .entry("add_bias_f32", Limits::registers(32)),
    ]
}

/// Every kernel of this crate in every specialisation, with what each may use.
///
/// The limits on registers keep at least 12 warps per scheduler for the kernels that only move
/// bytes; a spill is an error everywhere.
pub fn kernel_specs() -> Vec<KernelSpec> {
    let norms = NORM_VECTORS.into_iter().map(norm_spec);
    let ropes = HEAD_DIMS.into_iter().map(rope_spec);
    let others = (four_bit::specs().into_iter())
        .chain(unmerged::specs())
        .chain(sample::specs());
    common_specs()
        .into_iter()
        .chain(norms)
        .chain(ropes)
        .chain(others)
        .chain(decode_layers::specs())
        .chain(four_bit_layer::specs())
        .chain(wide_product::specs())
        .chain(gate_up::specs())
        .chain(cluster_product::specs())
        .chain(qkv_product::specs())
        .chain(whole_product::specs())
        .collect()
}

/// The kernels for one model, loaded on one device.
#[derive(Debug, Clone)]
pub struct Kernels {
    embed: Kernel,
    rms_norm: Kernel,
    qkv_rope_write: Kernel,
    qkv_rope_write_three: Kernel,
    silu_mul: Kernel,
    sample_partial: Kernel,
    sample_weigh: Kernel,
    sample_choose: Kernel,
    sample_top: Kernel,
    token_states: Kernel,
    random_matrix: Kernel,
    add_bias_bf16: Kernel,
    add_bias_f32: Kernel,
    hidden: usize,
    head_dim: usize,
}

impl Kernels {
    /// Compiles the kernels for the model's shape, or takes them from the compiler's cache, and
    /// loads them.
    ///
    /// # Errors
    /// [`Error::Option`] for a shape that no kernel is written for; [`Error::Cuda`]. Panics: none.
    pub fn load(compiler: &Compiler, device: &Device, config: &Qwen3Config) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let multiple = |option, size: usize| match size.is_multiple_of(8) {
            true => Ok(()),
            false => refuse(
                option,
                format!("is {size}; the CUDA backend needs a multiple of 8"),
            ),
        };
        multiple("hidden_size", hidden)?;
        multiple("intermediate_size", config.intermediate_size)?;
        multiple("vocab_size", config.vocab_size)?;
        if hidden > MAX_HIDDEN {
            return refuse(
                "hidden_size",
                format!("is {hidden}; the CUDA backend takes up to {MAX_HIDDEN}"),
            );
        }
        if !HEAD_DIMS.contains(&head_dim) {
            return refuse(
                "head_dim",
                format!("is {head_dim}; the CUDA backend has 64 and 128"),
            );
        }
        let mut specs = common_specs().to_vec();
        specs.extend(sample::specs());
        specs.push(norm_spec(hidden.div_ceil(4 * NORM_THREADS as usize)));
        specs.push(rope_spec(head_dim));
        let modules = compiler.load_all(device, &specs)?;
        let kernel = |spec: usize, name: &str| -> Result<Kernel> {
            let module: &Module = &modules[spec];
            Ok(module.kernel(name)?)
        };
        Ok(Self {
            embed: kernel(0, "embed")?,
            silu_mul: kernel(1, "silu_mul")?,
            random_matrix: kernel(2, "random_matrix")?,
            add_bias_bf16: kernel(3, "add_bias_bf16")?,
            add_bias_f32: kernel(3, "add_bias_f32")?,
            sample_partial: kernel(4, "sample_partial")?,
            sample_weigh: kernel(4, "sample_weigh")?,
            sample_choose: kernel(5, "sample_choose")?,
            sample_top: kernel(6, "sample_top")?,
            token_states: kernel(7, "token_states")?,
            rms_norm: kernel(8, "rms_norm")?,
            qkv_rope_write: kernel(9, "qkv_rope_write")?,
            qkv_rope_write_three: kernel(9, "qkv_rope_write_three")?,
            hidden,
            head_dim,
        })
    }
}

/// Where [`Kernels::embed`] takes its token ids from.
#[derive(Debug, Clone, Copy)]
pub enum TokenSource<'a> {
    /// `[rows]` ids.
    Ids(DeviceSlice<'a, u32>),
    /// The id sampled last for each row's slot.
    Last {
        /// `[rows]` slots.
        slots: DeviceSlice<'a, i32>,
        /// `[n_slots]` ids.
        last_token: DeviceSlice<'a, u32>,
    },
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct EmbedParams {
    table: u64,
    token_ids: u64,
    slots: u64,
    last_token: u64,
    residual: u64,
    rows: u32,
    hidden: u32,
    vocab: u32,
    n_slots: u32,
}

/// What [`Kernels::rms_norm`] normalises.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// `[source rows, hidden]`; takes up `delta` unless `row_index` is given.
    pub residual: DeviceSlice<'a, f32>,
    /// `[source rows, hidden]`, added to the residual first.
    pub delta: Option<DeviceSlice<'a, f32>>,
    /// `[hidden]`.
    pub weight: DeviceSlice<'a, f32>,
    /// `[rows]`: the source row of each row; without it row `i` comes from row `i`.
    pub row_index: Option<DeviceSlice<'a, i32>>,
    /// `[rows, hidden]`.
    pub out: DeviceSlice<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RmsNormParams {
    residual: u64,
    delta: u64,
    weight: u64,
    row_index: u64,
    out: u64,
    rows: u32,
    hidden: u32,
    source_rows: u32,
    delta_is_f32: u32,
    eps: f32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SiluMulParams {
    gate_up: u64,
    out: u64,
    rows: u32,
    inner: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct AddBiasParams {
    out: u64,
    bias: u64,
    columns: u32,
    unused: u32,
}

/// The product that [`Kernels::add_bias`] adds to.
#[derive(Debug, Clone, Copy)]
pub enum Product<'a> {
    /// `[rows, columns]` in bf16.
    Bf16(DeviceSlice<'a, bf16>),
    /// `[rows, columns]` in f32.
    F32(DeviceSlice<'a, f32>),
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RandomMatrixParams {
    out: u64,
    quantiles: u64,
    n: u64,
    stream: u64,
}

fn refuse<T>(option: &'static str, problem: String) -> Result<T> {
    Err(Error::Option { option, problem })
}

/// `what` must hold exactly `expected` elements.
fn same(what: &'static str, len: usize, expected: usize) -> Result<()> {
    match len == expected {
        true => Ok(()),
        false => refuse(
            what,
            format!("holds {len} elements, the shape asks for {expected}"),
        ),
    }
}

/// Vector accesses need the address aligned; the driver's own allocations are, slices of them may not be.
fn aligned(what: &'static str, address: u64, bytes: u64) -> Result<()> {
    match address.is_multiple_of(bytes) {
        true => Ok(()),
        false => refuse(
            what,
            format!("starts at {address:#x}, which is no multiple of {bytes}"),
        ),
    }
}

fn small(what: &'static str, size: usize) -> Result<u32> {
    u32::try_from(size).or_else(|_| refuse(what, format!("is {size}, more than 32 bits hold")))
}

impl Kernels {
    /// `residual[row, :] = table[token, :]` for `rows` = `residual.len() / hidden` rows; `table` is `[vocab, hidden]`.
    /// A token id outside the vocabulary gives a row of NaN.
    ///
    /// # Errors
    /// [`Error::Option`] for lengths that do not fit each other; [`Error::Cuda`]. Panics: none.
    pub fn embed(
        &self,
        stream: &Stream,
        table: DeviceSlice<'_, bf16>,
        tokens: TokenSource<'_>,
        residual: DeviceSlice<'_, f32>,
    ) -> Result<()> {
        let hidden = self.hidden;
        let rows = residual.len() / hidden;
        let vocab = table.len() / hidden;
        same("residual", residual.len(), rows * hidden)?;
        same("table", table.len(), vocab * hidden)?;
        aligned("table", table.ptr(), 16)?;
        aligned("residual", residual.ptr(), 16)?;
        let mut params = EmbedParams {
            table: table.ptr(),
            residual: residual.ptr(),
            rows: small("rows", rows)?,
            hidden: small("hidden", hidden)?,
            vocab: small("vocab", vocab)?,
            ..Zeroable::zeroed()
        };
        match tokens {
            TokenSource::Ids(ids) => {
                same("token ids", ids.len(), rows)?;
                params.token_ids = ids.ptr();
                stream.keep_memory(ids);
            }
            TokenSource::Last { slots, last_token } => {
                same("slots", slots.len(), rows)?;
                params.slots = slots.ptr();
                params.last_token = last_token.ptr();
                params.n_slots = small("slots", last_token.len())?;
                stream.keep_memory(slots);
                stream.keep_memory(last_token);
            }
        }
        stream.keep_memory(table);
        stream.keep_memory(residual);
        if rows == 0 {
            return Ok(());
        }
        let config = LaunchConfig::new(params.rows, EMBED_THREADS).programmatic(true);
        // SAFETY: every buffer has the length that the kernel's header gives it, checked above, is kept by a capture,
        // and the kernel checks ids and slots against `vocab` and `n_slots`.
        Ok(unsafe { self.embed.launch(stream, &config, &params) }?)
    }

    /// Residual add and RMSNorm of `rows` = `out.len() / hidden` rows.
    ///
    /// # Errors
    /// [`Error::Option`] for lengths that do not fit each other; [`Error::Cuda`]. Panics: none.
    pub fn rms_norm(&self, stream: &Stream, norm: &RmsNorm<'_>) -> Result<()> {
        let hidden = self.hidden;
        let rows = norm.out.len() / hidden;
        let source_rows = norm.residual.len() / hidden;
        same("out", norm.out.len(), rows * hidden)?;
        same("residual", norm.residual.len(), source_rows * hidden)?;
        same("weight", norm.weight.len(), hidden)?;
        if let Some(delta) = norm.delta {
            same("delta", delta.len(), norm.residual.len())?;
            aligned("delta", delta.ptr(), 16)?;
            stream.keep_memory(delta);
        }
        match norm.row_index {
            Some(index) => {
                same("row index", index.len(), rows)?;
                stream.keep_memory(index);
            }
            None => same("residual", source_rows, rows)?,
        }
        aligned("residual", norm.residual.ptr(), 16)?;
        aligned("weight", norm.weight.ptr(), 16)?;
        aligned("out", norm.out.ptr(), 8)?;
        stream.keep_memory(norm.residual);
        stream.keep_memory(norm.weight);
        stream.keep_memory(norm.out);
        if rows == 0 {
            return Ok(());
        }
        if source_rows == 0 {
            return refuse("residual", "has no rows to take from".into());
        }
        let params = RmsNormParams {
            residual: norm.residual.ptr(),
            delta: norm.delta.map_or(0, |delta| delta.ptr()),
            weight: norm.weight.ptr(),
            row_index: norm.row_index.map_or(0, |index| index.ptr()),
            out: norm.out.ptr(),
            rows: small("rows", rows)?,
            hidden: small("hidden", hidden)?,
            source_rows: small("source rows", source_rows)?,
            delta_is_f32: 1,
            eps: norm.eps,
            unused: 0,
        };
        let config = LaunchConfig::new(params.rows, NORM_THREADS).programmatic(true);
        // SAFETY: as in `embed`; the kernel is compiled for this width, and checks `row_index` against `source_rows`.
        Ok(unsafe { self.rms_norm.launch(stream, &config, &params) }?)
    }

    /// Norm and rotation of query and key heads, and the write of keys and values into the cache, for `rows` =
    /// `positions.len()` rows. Rows without a mapped page write nothing to the cache. With `scale` the product was made from
    /// rows that their norm had not yet scaled.
    ///
    /// # Errors
    /// [`Error::Option`] for lengths that do not fit each other; [`Error::Cuda`]. Panics: none.
    pub fn qkv_rope_write(
        &self,
        stream: &Stream,
        op: &QkvRopeWrite<'_>,
        scale: Option<&RowScale<'_>>,
    ) -> Result<()> {
        let params = op.accept(stream, self.head_dim)?;
        if params.rows == 0 {
            return Ok(());
        }
        let (kernel, heads) = match ROPE_THREE_HEADS.contains(&params.rows) {
            true => (&self.qkv_rope_write_three, 3),
            false => (&self.qkv_rope_write, 1),
        };
        let blocks = (op.q_heads + 2 * op.kv_heads).div_ceil(ROPE_WARPS * heads);
        let blocks = small("heads", blocks)?;
        let config = LaunchConfig::with_dimensions([params.rows, blocks, 1], [ROPE_WARPS as u32 * 32, 1, 1])
            .programmatic(true);
        let params = rope_write::QkvRopeWriteLaunch::new(params, scale, stream)?;
        // SAFETY: as in `embed`; the kernel is compiled for this head dimension, and checks slots, pages and places
        // against the table's and the cache's size.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }

    /// `out = silu(gate) * up`, with `gate_up` `[rows, 2 * inner]` and `out` `[rows, inner]`.
    ///
    /// # Errors
    /// [`Error::Option`] for lengths that do not fit each other or an `inner` that is no multiple of 8;
    /// [`Error::Cuda`]. Panics: none.
    pub fn silu_mul(
        &self,
        stream: &Stream,
        gate_up: DeviceSlice<'_, bf16>,
        out: DeviceSlice<'_, bf16>,
        rows: usize,
    ) -> Result<()> {
        stream.keep_memory(gate_up);
        stream.keep_memory(out);
        if rows == 0 {
            return Ok(());
        }
        let inner = out.len() / rows;
        same("out", out.len(), rows * inner)?;
        same("gate_up", gate_up.len(), rows * 2 * inner)?;
        if inner == 0 || !inner.is_multiple_of(8) {
            return refuse("inner", format!("is {inner}; a multiple of 8 is needed"));
        }
        aligned("gate_up", gate_up.ptr(), 16)?;
        aligned("out", out.ptr(), 16)?;
        let params = SiluMulParams {
            gate_up: gate_up.ptr(),
            out: out.ptr(),
            rows: small("rows", rows)?,
            inner: small("inner", inner)?,
        };
        let blocks = small("inner", inner.div_ceil(8 * SILU_THREADS))?;
        let config = LaunchConfig::with_dimensions([params.rows, blocks, 1], [SILU_THREADS as u32, 1, 1])
            .programmatic(true);
        // SAFETY: as in `embed`.
        Ok(unsafe { self.silu_mul.launch(stream, &config, &params) }?)
    }

    /// Adds `bias`, f32 `[columns]`, to each of `rows` rows of a product.
    ///
    /// # Errors
    /// [`Error::Option`] for lengths that do not fit each other; [`Error::Cuda`]. Panics: none.
    pub fn add_bias(
        &self,
        stream: &Stream,
        product: Product<'_>,
        bias: DeviceSlice<'_, f32>,
        rows: usize,
    ) -> Result<()> {
        let columns = bias.len();
        stream.keep_memory(bias);
        let (kernel, out, len) = match product {
            Product::Bf16(out) => {
                stream.keep_memory(out);
                (&self.add_bias_bf16, out.ptr(), out.len())
            }
            Product::F32(out) => {
                stream.keep_memory(out);
                (&self.add_bias_f32, out.ptr(), out.len())
            }
        };
        same("out", len, rows * columns)?;
        if rows == 0 {
            return Ok(());
        }
        if columns == 0 || !columns.is_multiple_of(4) {
            return refuse("columns", format!("is {columns}; a multiple of 4 is needed"));
        }
        aligned("out", out, 16)?;
        aligned("bias", bias.ptr(), 16)?;
        let params = AddBiasParams {
            out,
            bias: bias.ptr(),
            columns: small("columns", columns)?,
            unused: 0,
        };
        let blocks = small("columns", columns.div_ceil(4 * BIAS_THREADS))?;
        let config =
            LaunchConfig::with_dimensions([small("rows", rows)?, blocks, 1], [BIAS_THREADS as u32, 1, 1]);
        // SAFETY: as in `embed`.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }

    /// Random elements from `quantiles` (`[65536]`), as [`Weights::random`](crate::Weights::random) draws them.
    pub(crate) fn random_matrix(
        &self,
        stream: &Stream,
        out: DeviceSlice<'_, bf16>,
        quantiles: &DeviceBuffer<bf16>,
        sequence: u64,
    ) -> Result<()> {
        same("quantiles", quantiles.len(), 1 << 16)?;
        if out.is_empty() {
            return Ok(());
        }
        stream.keep_memory(out);
        stream.keep_memory(quantiles);
        let n = out.len() as u64;
        let params = RandomMatrixParams {
            out: out.ptr(),
            quantiles: quantiles.ptr(),
            n,
            stream: sequence,
        };
        let blocks = n.div_ceil(4 * u64::from(RANDOM_THREADS)).min(4096) as u32;
        let config = LaunchConfig::new(blocks, RANDOM_THREADS).programmatic(true);
        // SAFETY: as in `embed`; the table covers every 16-bit index.
        Ok(unsafe { self.random_matrix.launch(stream, &config, &params) }?)
    }
}
