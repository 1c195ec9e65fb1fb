//! The launch of `kernels/qkv_product.cuh`: QKV of a decode step of 33 to 256 rows, with norm and rotation of queries and keys and the
//! write of keys and values behind it.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Arch, Archs, Compiler, Device, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
    TensorMap,
};
use half::bf16;

use super::batch_rings::{BatchRings, barrier_bytes, batch_headers, inner_columns, load_forms};
use super::cluster_product::{CLUSTER_PRIMITIVES, CLUSTER_RINGS, clusters_at_once};
use super::rope_write::{QkvRopeWrite, QkvRopeWriteLaunch, RowScale};
use super::wide_product::{CHUNK, SHARED_BYTES, WIDE_HEAD_DIM, needed, rows_map};
use super::{ROPE, ROPE_WRITE, aligned, refuse, same, small};
use crate::Result;

const QKV_PRODUCT: Header = Header::new("qkv_product.cuh", include_str!("../../kernels/qkv_product.cuh"));

/// Batch rows that kernels are compiled for.
const ROWS: [usize; 5] = [64, 96, 128, 192, 256];
/// Registers of a thread at most: up to twelve warps.
const REGISTERS: u32 = 168;
/// Most slots of a ring.
const MOST_SLOTS: usize = 10;
/// Blocks of a cluster, which share a head's weights, each with so many of the batch rows.
const BLOCKS: usize = 2;

/// Fewest and most batch rows. With fewer [`WideProducts`](super::WideProducts) are faster.
pub const QKV_PRODUCT_ROWS: std::ops::RangeInclusive<usize> = 33..=ROWS[ROWS.len() - 1];

/// A specialisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Batch rows, one of [`ROWS`]; fewer are padded.
    rows: usize,
}

impl Form {
    /// Batch rows of a block.
    const fn columns(&self) -> usize {
        self.rows / BLOCKS
    }

    const fn rings(&self) -> BatchRings {
        BatchRings {
            columns: self.columns(),
            tile_rows: WIDE_HEAD_DIM,
        }
    }

    /// As `QkvProductMemory::THREADS` in the kernel.
    const fn threads(&self) -> usize {
        self.rings().groups() * 128 + 128
    }

    /// Bytes beside the rings: barriers, the norm's weights, and of each row where it goes, its angles and its scale.
    const fn beside(&self, w_slots: usize, x_slots: usize) -> usize {
        barrier_bytes(w_slots, x_slots) + 16 + 4 * WIDE_HEAD_DIM + 16 * self.columns()
    }

    /// Slots of the ring of weights and of the ring of activations: as many of each as fit, and one more of weights if it does.
    const fn slots(&self) -> (usize, usize) {
        let room = SHARED_BYTES - self.rings().padding() - self.beside(MOST_SLOTS, MOST_SLOTS);
        let (w_slot, x_slot) = (self.rings().w_slot(), self.rings().x_slot());
        let fit = room / (w_slot + x_slot);
        let both = if fit < MOST_SLOTS { fit } else { MOST_SLOTS };
        let left = room - both * (w_slot + x_slot);
        let more = left >= w_slot && both < MOST_SLOTS;
        (both + more as usize, both)
    }

    /// Slots of weights that are on their way at once, 16 KB each.
    const fn flying(&self) -> usize {
        if self.rings().groups() == 1 { 6 } else { 4 }
    }

    /// As `QkvProductMemory::BYTES` in the kernel.
    const fn shared_bytes(&self) -> usize {
        let (w_slots, x_slots) = self.slots();
        self.rings().bytes(w_slots, x_slots) + self.beside(w_slots, x_slots)
    }

    fn spec(&self) -> KernelSpec {
        let (w_slots, x_slots) = self.slots();
        KernelSpec::new(
            format!("qkv_product<{}>", self.rows),
            include_str!("../../kernels/qkv_product.cu"),
        )
        .headers(batch_headers(WIDE_HEAD_DIM))
        .headers([ROPE, ROPE_WRITE, CLUSTER_PRIMITIVES, CLUSTER_RINGS, QKV_PRODUCT])
        .define("OF_COLUMNS", self.columns())
        .define("OF_W_SLOTS", w_slots)
        .define("OF_X_SLOTS", x_slots)
        .define("OF_W_FLYING", self.flying())
        .archs(Archs::Only(vec![Arch::SM_90A]))
        .entry("qkv_product", Limits::registers(REGISTERS))
    }
}

/// Every specialisation.
pub(super) fn specs() -> impl Iterator<Item = KernelSpec> {
    ROWS.into_iter().map(|rows| Form { rows }.spec())
}

/// The product of as many rows as `heads` has positions: `heads.qkv = input · weightᵀ`, of which queries alone are written, normed
/// and rotated; keys and values go to the cache.
#[derive(Debug, Clone, Copy)]
pub struct QkvProductOp<'a> {
    /// `[(q_heads + 2 * kv_heads) * 128, K]`, row-major; K a multiple of 64.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[rows, K]`.
    pub input: DeviceSlice<'a, bf16>,
    /// Of rows that their norm has not yet scaled.
    pub scale: Option<RowScale<'a>>,
    /// What becomes of the product, of heads of [`WIDE_HEAD_DIM`].
    pub heads: QkvRopeWrite<'a>,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct QkvProductParams {
    w_map: TensorMap,
    x_map: TensorMap,
    rows: QkvRopeWriteLaunch,
    chunks: u32,
    unused: [u32; 9],
}

/// The kernels, loaded on one device.
#[derive(Debug)]
pub struct QkvProduct {
    kernels: Vec<(Form, Kernel)>,
}

impl QkvProduct {
    /// Compiles and loads the kernels for up to `max_rows` batch rows (those of [`QKV_PRODUCT_ROWS`] if it is more), or takes them
    /// from the compiler's cache. `None` on a device that cannot run them.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device, max_rows: usize) -> Result<Option<Self>> {
        if device.arch() != Arch::SM_90A {
            return Ok(None);
        }
        let rows = &ROWS[..needed(&ROWS, *QKV_PRODUCT_ROWS.start(), max_rows)];
        let forms = rows.iter().map(|&rows| Form { rows }).collect();
        let kernels = load_forms(compiler, device, forms, Form::spec, "qkv_product")?;
        Ok(Some(Self { kernels }))
    }

    /// Whether the blocks for so many heads of `head_dim`, query, key and value heads together, keep most of `multiprocessors` at work
    /// and fit them at once. Where they do not, a product of smaller tiles is faster.
    ///
    /// ```
    /// use qwen3_model::launch::QkvProduct;
    ///
    /// // Qwen3-4B, 14B, 1.7B and 32B on an H200.
    /// let fills = |heads| QkvProduct::fills(heads, 128, 132);
    /// assert!(fills(48) && fills(56) && !fills(32) && !fills(80));
    /// ```
    pub fn fills(heads: usize, head_dim: usize, multiprocessors: usize) -> bool {
        let at_once = clusters_at_once(BLOCKS, multiprocessors);
        head_dim == WIDE_HEAD_DIM && heads <= at_once && heads * 3 >= multiprocessors
    }

    /// Gives one launch to `stream`. Weights may be read before the kernels ahead in the stream have ended: whoever writes
    /// weights must wait for the device before more work is given to the stream.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn run(&self, stream: &Stream, op: &QkvProductOp<'_>) -> Result<()> {
        let rows = op.heads.positions.len();
        let fits = |form: &Form| QKV_PRODUCT_ROWS.contains(&rows) && rows <= form.rows;
        let Some((form, kernel)) = self.kernels.iter().find(|(form, _)| fits(form)) else {
            return refuse("rows", format!("{rows} rows at once are not possible"));
        };
        let heads = op.heads.q_heads + 2 * op.heads.kv_heads;
        let n = heads * WIDE_HEAD_DIM;
        let k = inner_columns(op.input, op.weight, rows, n)?;
        if let Some(scale) = op.scale {
            same("scaled columns", scale.width, k)?;
        }
        // Four elements are stored at once, and two of the angles loaded.
        for (what, buffer) in [
            ("qkv", op.heads.qkv),
            ("k_cache", op.heads.k_cache),
            ("v_cache", op.heads.v_cache),
        ] {
            aligned(what, buffer.ptr(), 8)?;
        }
        aligned("cos_sin", op.heads.cos_sin.ptr(), 8)?;
        for buffer in [op.weight, op.input] {
            stream.keep_memory(buffer);
        }
        let params = QkvProductParams {
            w_map: rows_map(op.weight, n, k, WIDE_HEAD_DIM / BLOCKS)?,
            x_map: rows_map(op.input, rows, k, form.columns())?,
            rows: QkvRopeWriteLaunch::new(
                op.heads.accept(stream, WIDE_HEAD_DIM)?,
                op.scale.as_ref(),
                stream,
            )?,
            chunks: small("chunks", k / CHUNK)?,
            unused: [0; 9],
        };
        let grid = small("blocks", heads * BLOCKS)?;
        let config = LaunchConfig::new(grid, form.threads() as u32)
            .dynamic_shared_bytes(form.shared_bytes() as u32)
            .cluster([BLOCKS as u32, 1, 1])
            .programmatic(true);
        // SAFETY: every buffer has the length that the kernel gives it, checked here, in `QkvRopeWrite::accept` and in
        // `QkvRopeWriteLaunch::new`, and is kept by a capture; the kernel checks slots, pages and places against the table's and the
        // cache's size. Blocks wait for those of their cluster, which run at the same time, and for no others.
        Ok(unsafe { kernel.launch(stream, &config, &params) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_a_multiprocessor_and_cover_what_is_on_its_way() {
        for form in ROWS.map(|rows| Form { rows }) {
            let (w_slots, x_slots) = form.slots();
            assert!(form.shared_bytes() <= SHARED_BYTES, "{form:?}");
            assert!(
                w_slots > form.flying() && x_slots >= 4,
                "{form:?}: {w_slots}, {x_slots}"
            );
            assert!(form.threads() * REGISTERS as usize <= 65_536, "{form:?}");
            // Boxes are of whole groups of 8 rows, and slots begin at multiples of 1,024 bytes.
            assert!(form.columns().is_multiple_of(8), "{form:?}");
            assert_eq!(form.columns() * BLOCKS, form.rows);
        }
        assert_eq!(size_of::<QkvProductParams>(), 448);
    }
}
