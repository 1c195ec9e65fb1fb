//! From bf16 to 4 bits, with the bits that bitsandbytes gives on a CPU.
//!
//! ```text
//!   absmax[b] = max |w|                          over a block of 64
//!   nibble    = the value nearest to w · (1 / absmax), below in a tie
//!
//!   double quantisation:  offset = mean of absmax,  x = absmax − offset in blocks of 256
//!   nested_absmax = max |x|,  q = the one of 256 values nearest to x / nested_absmax on a grid of 65,536 points
//! ```
//!
//! The grid is bitsandbytes' own: on a CPU it looks the 8-bit value up for the nearest of 65,536 points between −1 and 1,
//! so that close to the middle of two values the farther one can win.

use std::sync::OnceLock;

use half::bf16;
use rayon::prelude::*;

use super::QuantType;

/// Elements that share a scale: what transformers and bitsandbytes use unless told otherwise.
pub(super) const BLOCKSIZE: usize = 64;
/// Scales that share a scale of their own.
pub(super) const NESTED_BLOCKSIZE: usize = 256;
/// Blocks in a task.
const TASK: usize = 512;

/// A quantised matrix with the tensors that a file holds.
pub(super) struct Quantized {
    pub(super) packed: Vec<u8>,
    pub(super) absmax: Absmax,
}

pub(super) enum Absmax {
    Plain(Vec<f32>),
    Nested {
        quantized: Vec<u8>,
        absmax: Vec<f32>,
        offset: f32,
    },
}

impl Quantized {
    /// The scales that a reader of the tensors computes with.
    pub(super) fn decoded_absmax(&self) -> Vec<f32> {
        match &self.absmax {
            Absmax::Plain(absmax) => absmax.clone(),
            Absmax::Nested {
                quantized,
                absmax,
                offset,
            } => decode_absmax(quantized, nested_map(), absmax, NESTED_BLOCKSIZE, *offset),
        }
    }
}

/// `nested_map[q[b]] · nested_absmax[b / blocksize] + offset`.
pub(super) fn decode_absmax(
    quantized: &[u8],
    map: &[f32; 256],
    absmax: &[f32],
    blocksize: usize,
    offset: f32,
) -> Vec<f32> {
    let value = |(b, q): (usize, &u8)| map[usize::from(*q)] * absmax[b / blocksize] + offset;
    quantized.iter().enumerate().map(value).collect()
}

/// Quantises finite values.
pub(super) fn quantize(data: &[bf16], quant_type: QuantType, double: bool) -> Quantized {
    let (bounds, nibbles) = bounds(quant_type);
    let n_blocks = data.len().div_ceil(BLOCKSIZE);
    let mut packed = vec![0; data.len().div_ceil(2)];
    let mut absmax = vec![0.0; n_blocks];
    packed
        .par_chunks_mut(TASK * BLOCKSIZE / 2)
        .zip(absmax.par_chunks_mut(TASK))
        .zip(data.par_chunks(TASK * BLOCKSIZE))
        .for_each(|((packed, absmax), data)| {
            let blocks = packed
                .chunks_mut(BLOCKSIZE / 2)
                .zip(absmax)
                .zip(data.chunks(BLOCKSIZE));
            for ((packed, absmax), block) in blocks {
                *absmax = quantize_block(block, packed, &bounds, &nibbles);
            }
        });
    let absmax = match double {
        false => Absmax::Plain(absmax),
        true => nest(&absmax),
    };
    Quantized { packed, absmax }
}

/// Quantises one block and gives its scale.
fn quantize_block(block: &[bf16], packed: &mut [u8], bounds: &[f32; 15], nibbles: &[u8; 16]) -> f32 {
    let absmax = block.iter().fold(0.0f32, |max, w| max.max(w.to_f32().abs()));
    // A short block is divided instead, as bitsandbytes does.
    let whole = block.len() == BLOCKSIZE;
    let (divisor, factor) = (absmax.max(1e-38), 1.0 / absmax.max(1e-38));
    let nibble = |w: &bf16| {
        let w = w.to_f32();
        let scaled = if whole { w * factor } else { w / divisor }.clamp(-1.0, 1.0);
        nibbles[bounds.iter().filter(|bound| scaled > **bound).count()]
    };
    for (byte, pair) in packed.iter_mut().zip(block.chunks(2)) {
        // What fills the last byte of an odd number of elements is the nibble of 0.
        let second = pair.get(1).unwrap_or(&bf16::ZERO);
        *byte = nibble(&pair[0]) << 4 | nibble(second);
    }
    if whole { absmax } else { divisor }
}

/// The middles between neighbouring values, and the nibble of each interval.
pub(crate) fn bounds(quant_type: QuantType) -> ([f32; 15], [u8; 16]) {
    let map = quant_type.map();
    let mut nibbles: [u8; 16] = std::array::from_fn(|nibble| nibble as u8);
    // Stable: of the two zeros of fp4 the positive one comes first.
    nibbles.sort_by(|a, b| {
        let (a, b) = (map[usize::from(*a)], map[usize::from(*b)]);
        a.partial_cmp(&b).unwrap_or(std::cmp::Ordering::Equal)
    });
    let value = |i: usize| map[usize::from(nibbles[i])];
    (std::array::from_fn(|i| (value(i) + value(i + 1)) / 2.0), nibbles)
}

/// Double quantisation of the scales.
fn nest(scales: &[f32]) -> Absmax {
    let sum: f64 = scales.iter().copied().map(f64::from).sum();
    let offset = (sum / scales.len().max(1) as f64) as f32;
    let grid = nested_grid();
    let mut quantized = Vec::with_capacity(scales.len());
    let mut absmax = Vec::with_capacity(scales.len().div_ceil(NESTED_BLOCKSIZE));
    for block in scales.chunks(NESTED_BLOCKSIZE) {
        let max = block.iter().fold(0.0f32, |max, s| max.max((s - offset).abs()));
        let point = |s: &f32| {
            // All equal: every x is 0, and so is its scale.
            let x = if max > 0.0 { (s - offset) / max } else { 0.0 };
            ((x + 1.0) * GRID_SCALE + 0.5) as usize
        };
        quantized.extend(block.iter().map(|s| grid[point(s).min(grid.len() - 1)]));
        absmax.push(max);
    }
    Absmax::Nested {
        quantized,
        absmax,
        offset,
    }
}

/// Points of the grid per unit.
const GRID_SCALE: f32 = 32767.5;

/// The nearest 8-bit value for each of 65,536 points from −1 to 1.
fn nested_grid() -> &'static [u8] {
    static GRID: OnceLock<Vec<u8>> = OnceLock::new();
    GRID.get_or_init(|| {
        let map = nested_map();
        let point = |i: u32| {
            let x = f64::from(i) / f64::from(GRID_SCALE) - 1.0;
            let middle = |pair: &[f32]| (f64::from(pair[0]) + f64::from(pair[1])) / 2.0;
            map.windows(2).filter(|pair| x > middle(pair)).count() as u8
        };
        (0..1 << 16).map(point).collect()
    })
}

/// bitsandbytes' 8-bit values, sorted: signs, seven decades, and in each as many steps as bits are left.
pub(super) fn nested_map() -> &'static [f32; 256] {
    static MAP: OnceLock<[f32; 256]> = OnceLock::new();
    MAP.get_or_init(|| {
        let mut values = vec![0.0, 1.0];
        for decade in 0..7 {
            let steps = 1usize << decade;
            // From 0.1 to 1, each half counted from its own end, with one rounding each as torch does.
            let step = (1.0f32 - 0.1) / steps as f32;
            let boundary = |i: usize| match i < steps.div_ceil(2) {
                true => step.mul_add(i as f32, 0.1),
                false => (-step).mul_add((steps - i) as f32, 1.0),
            };
            let scale = 10f64.powi(decade - 6) as f32;
            for i in 0..steps {
                let middle = (boundary(i) + boundary(i + 1)) / 2.0;
                values.extend([scale * middle, -scale * middle]);
            }
        }
        values.sort_by(f32::total_cmp);
        std::array::from_fn(|i| values[i])
    })
}
