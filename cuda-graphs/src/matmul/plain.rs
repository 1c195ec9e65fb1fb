//! Products by a kernel of this crate.

use bytemuck::{Pod, Zeroable};

use super::{MatmulDims, MatmulElement};
use crate::blas::{Addresses, TYPE_F32};
use crate::compiler::Compiler;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, LaunchConfig};
use crate::spec::{KernelSpec, Limits};
use crate::stream::Stream;

/// Rows and columns of a tile, and threads of a block; in step with the kernel.
const TILE: usize = 64;
const THREADS: u32 = 128;
/// Most tiles of rows: the grid's second dimension ends there.
const MOST_ROW_TILES: usize = 65_535;

/// Every kernel of this crate, for compiling ahead and for tests without a GPU.
pub fn kernel_specs() -> Vec<KernelSpec> {
    vec![spec()]
}

fn spec() -> KernelSpec {
    KernelSpec::new("product", include_str!("../../kernels/product.cu"))
        .entry("plain_product", Limits::registers(128))
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ProductParams {
    x: u64,
    w: u64,
    y: u64,
    residual: u64,
    stride: u64,
    m: u32,
    n: u32,
    k: u32,
    to_f32: u32,
}

/// The kernel on one device.
#[derive(Debug)]
pub(super) struct PlainProducts(Kernel);

impl PlainProducts {
    pub(super) fn load(device: &Device, compiler: &Compiler) -> Result<Self> {
        Ok(Self(compiler.load(device, &spec())?.kernel("plain_product")?))
    }

    /// Gives a product whose operands were checked to the stream.
    pub(super) fn run<T: MatmulElement>(
        &self,
        stream: &Stream,
        dims: MatmulDims,
        stride: usize,
        at: Addresses,
    ) -> Result<()> {
        let MatmulDims { m, n, k } = dims;
        let in_32_bits = |size: usize| {
            // Whole tiles and steps beyond the end are counted in 32 bits, too.
            u32::try_from(size)
                .ok()
                .filter(|&size| size <= u32::MAX - TILE as u32)
                .ok_or_else(|| refuse(format!("{dims:?} is too large for the plain kernel")))
        };
        let rows = m.div_ceil(TILE);
        if rows > MOST_ROW_TILES {
            return Err(refuse(format!("{m} rows are too many for the plain kernel")));
        }
        let params = ProductParams {
            x: at.x,
            w: at.w,
            y: at.y,
            residual: at.residual.unwrap_or(0),
            stride: stride as u64,
            m: in_32_bits(m)?,
            n: in_32_bits(n)?,
            k: in_32_bits(k)?,
            to_f32: u32::from(T::CODE == TYPE_F32),
        };
        let grid = [in_32_bits(n.div_ceil(TILE))?, rows as u32, 1];
        let config = LaunchConfig::with_dimensions(grid, [THREADS, 1, 1]);
        // SAFETY: the caller has checked lengths, alignment and device of all operands, which live until the product is done,
        // since freeing waits for the device, and as long as a graph that captured it.
        unsafe { self.0.launch(stream, &config, &params) }
    }
}

fn refuse(why: String) -> Error {
    Error::InvalidArgument { what: "product", why }
}
