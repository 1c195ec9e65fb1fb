//! Factors on their way into page-locked memory.

use crate::{LowRankTerm, ModuleUpdate, Result};
use cuda_graphs::PinnedBuffer;
use pulp::Arch;
use rayon::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};

/// Elements of a segment at most: the unit of parallel work.
pub(super) const SEGMENT: usize = 1 << 16;

/// Some consecutive values and their place, in bytes, in a buffer on the device.
#[derive(Clone, Copy)]
pub(super) struct Segment<'a> {
    pub(super) at: usize,
    pub(super) values: Values<'a>,
    /// Collects the bits of the greatest magnitude.
    pub(super) greatest: Option<&'a AtomicU32>,
}

#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    F32(&'a [f32]),
    /// Values whose low 16 bits are zero: uploaded as bf16.
    Bf16(&'a [f32]),
}

impl Segment<'_> {
    /// Where the segment ends, in bytes.
    pub(super) fn end(&self) -> usize {
        self.at
            + match self.values {
                Values::F32(values) => 4 * values.len(),
                Values::Bf16(values) => 2 * values.len(),
            }
    }

    /// Writes the values at a place of the staging buffer.
    pub(super) fn pack(&self, to: &PinnedBuffer<u8>, at: usize) -> Result<()> {
        Arch::new().dispatch(
            #[inline(always)]
            || self.pack_here(to, at),
        )
    }

    #[inline(always)]
    fn pack_here(&self, to: &PinnedBuffer<u8>, at: usize) -> Result<()> {
        const PIECE: usize = 2048;
        let mut greatest = 0;
        match self.values {
            // Piece by piece, so that a value is read from memory once.
            Values::F32(values) => {
                for (i, piece) in values.chunks(PIECE).enumerate() {
                    to.write(at + 4 * PIECE * i, bytemuck::cast_slice(piece))?;
                    if self.greatest.is_some() {
                        greatest = greatest.max(greatest_bits(piece));
                    }
                }
            }
            Values::Bf16(values) => {
                let mut narrow = [0u16; PIECE];
                for (i, piece) in values.chunks(PIECE).enumerate() {
                    for (to, from) in narrow.iter_mut().zip(piece) {
                        *to = (from.to_bits() >> 16) as u16;
                    }
                    to.write(at + 2 * PIECE * i, bytemuck::cast_slice(&narrow[..piece.len()]))?;
                    if self.greatest.is_some() {
                        greatest = greatest.max(greatest_bits(piece));
                    }
                }
            }
        }
        if let Some(all) = self.greatest {
            all.fetch_max(greatest, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Bits of the greatest magnitude: magnitudes are ordered as their bits are.
#[inline(always)]
fn greatest_bits(values: &[f32]) -> u32 {
    values
        .iter()
        .fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff))
}

/// How a term's factors travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) left_bf16: bool,
    pub(super) right_bf16: bool,
    /// No value has more than 11 significant bits.
    pub(super) whole: bool,
}

impl Format {
    /// Looks through a term's factors, until the first that is a full f32, if it is not known which bits they have. DoRA's
    /// norms are computed from f32.
    pub(super) fn of(term: &LowRankTerm, bits: Option<[u32; 2]>) -> Self {
        if term.magnitude.is_some() {
            return Self::default();
        }
        let none = |side: usize, values: &[f32], mask: u32| match bits {
            Some(bits) => bits[side] & mask == 0,
            // Most have such a bit in one of the first.
            None => {
                let (first, rest) = values.split_at(values.len().min(256));
                none_set(first, mask) && rest.par_chunks(SEGMENT).all(|c| none_set(c, mask))
            }
        };
        let (left_bf16, right_bf16) = (none(0, &term.left, 0xffff), none(1, &term.right, 0xffff));
        let whole = |side: usize, bf16: bool, values: &[f32]| bf16 || none(side, values, 0x1fff);
        Self {
            left_bf16,
            right_bf16,
            whole: whole(0, left_bf16, &term.left) && whole(1, right_bf16, &term.right),
        }
    }

    /// Of all terms of an update.
    pub(super) fn of_terms(update: &ModuleUpdate) -> Vec<Self> {
        let terms = update.terms.iter().zip(&update.bits);
        terms.map(|(term, bits)| Self::of(term, *bits)).collect()
    }
}

/// Whether no value has any of these bits.
fn none_set(values: &[f32], mask: u32) -> bool {
    let or = |piece: &[f32]| piece.iter().fold(0, |or, v| or | v.to_bits());
    values.chunks(256).all(|piece| or(piece) & mask == 0)
}

/// The power of two that brings values of this greatest magnitude to [2¹², 2¹³); what is beyond its reach is left to f64
/// by the kernel.
pub(super) fn unit(greatest_bits: u32) -> f32 {
    if greatest_bits == 0 {
        return 1.0;
    }
    let exponent = (greatest_bits >> 23) as i32 - 127;
    f32::from_bits(((127 + (12 - exponent).clamp(-100, 100)) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_value_comes_into_range() {
        for value in [1f32, 0.37, 1e-20, 123.0, 1e20, 4096.0, 8191.9] {
            let scaled = value * unit(value.to_bits());
            assert!((4096.0..8192.0).contains(&scaled), "{value}: {scaled}");
        }
        for extreme in [f32::MAX, f32::MIN_POSITIVE, 1e-45] {
            assert!(unit(extreme.to_bits()).is_normal());
        }
        assert_eq!(unit(0), 1.0);
    }

    #[test]
    fn formats_are_told_from_the_values() {
        let format = |left: Vec<f32>, right: Vec<f32>| {
            let term = LowRankTerm {
                r: 1,
                left: left.into(),
                right: right.into(),
                scaling: 1.0,
                magnitude: None,
            };
            let bits = |values: &[f32]| values.iter().fold(0, |bits, v| bits | v.to_bits());
            let known = Format::of(&term, Some([bits(&term.left), bits(&term.right)]));
            assert_eq!(Format::of(&term, None), known);
            known
        };
        let (bf16, f16, f32) = (1.5f32, 1.0 + 1.0 / 1024.0, 1.0 + 1.0 / 8192.0);
        let both = format(vec![bf16; 300], vec![bf16; 3]);
        assert!(both.left_bf16 && both.right_bf16 && both.whole);
        let mixed = format(vec![bf16; 300], vec![f16; 300]);
        assert!(mixed.left_bf16 && !mixed.right_bf16 && mixed.whole);
        let mut last = vec![bf16; 300];
        last[299] = f32;
        let full = format(vec![bf16; 3], last);
        assert!(full.left_bf16 && !full.right_bf16 && !full.whole);
    }
}
