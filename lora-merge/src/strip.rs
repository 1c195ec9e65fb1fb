//! Sums of one row on their way into bf16.

use half::bf16;

/// Columns that are rounded together, row by row.
pub(crate) const STRIP: usize = 256;
/// Bound on the roundings of g·W₀ relative to it: four times what is needed.
const SLACK: f32 = 2.4e-7;
/// Elements that are tested together for being left open.
const CHUNK: usize = 32;
/// Half the distance between two bf16 in bits of an f32.
const HALF: u32 = 0x8000;
/// Brings the magnitudes of infinity and NaN, and no others, to the highest bit.
const FINITE: u32 = (1 << 31) - f32::INFINITY.to_bits();

/// What a task found.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) changed: u16,
    pub(crate) differs: u16,
    pub(crate) recomputed: u64,
    pub(crate) not_finite: Option<usize>,
}

/// Bits in which the elements of a strip changed, and in which they differ from W₀, by their place in a chunk: put together
/// at the end, they cost no reduction for each chunk.
struct Moved {
    /// Whether it was known before that there are such elements: then nobody looks, and former values need not be read.
    known: bool,
    changed: [u16; CHUNK],
    differs: [u16; CHUNK],
}

/// Up to `STRIP` sums of one row, ready to be added to W₀ and rounded. All slices have the same length.
pub(crate) struct Strip<'a> {
    pub(crate) w0: &'a [bf16],
    pub(crate) sums: &'a [f32],
    pub(crate) norms: &'a [f32],
    pub(crate) bound: f32,
}

impl Strip<'_> {
    /// A row that no term touches.
    #[inline(always)]
    pub(crate) fn keep(&self, out: &mut [bf16], found: &mut Found) {
        for (out, w0) in out.iter_mut().zip(self.w0) {
            found.changed |= out.to_bits() ^ w0.to_bits();
            *out = *w0;
        }
    }

    /// Adds, rounds, and marks what the error bound leaves open. Returns whether it leaves anything open.
    #[inline(always)]
    pub(crate) fn round<const GAIN: bool>(
        &self,
        gain: f32,
        out: &mut [bf16],
        doubt: &mut [u8; STRIP],
        found: &mut Found,
    ) -> bool {
        let n = self.w0.len().min(STRIP);
        let (w0, sums, norms) = (&self.w0[..n], &self.sums[..n], &self.norms[..n]);
        let (out, doubt) = (&mut out[..n], &mut doubt[..n]);
        let mut any = false;
        let mut moved = Moved {
            known: found.changed != 0 && found.differs != 0,
            changed: [0; CHUNK],
            differs: [0; CHUNK],
        };
        let (w0, w0_rest) = w0.as_chunks::<CHUNK>();
        let (sums, sums_rest) = sums.as_chunks::<CHUNK>();
        let (norms, norms_rest) = norms.as_chunks::<CHUNK>();
        let (out, out_rest) = out.as_chunks_mut::<CHUNK>();
        let (doubt, doubt_rest) = doubt.as_chunks_mut::<CHUNK>();
        let chunks = w0.iter().zip(sums).zip(norms).zip(out).zip(doubt);
        for ((((w0, sums), norms), out), doubt) in chunks {
            any |= self.round_some::<GAIN>(gain, w0, sums, norms, out, doubt, &mut moved);
        }
        if !w0_rest.is_empty() {
            let rest = (w0_rest, sums_rest, norms_rest, out_rest, doubt_rest);
            any |= self.round_some::<GAIN>(gain, rest.0, rest.1, rest.2, rest.3, rest.4, &mut moved);
        }
        found.changed |= moved.changed.iter().fold(0, |all, bits| all | bits);
        found.differs |= moved.differs.iter().fold(0, |all, bits| all | bits);
        any
    }

    /// `round` for some elements, at most `CHUNK`; quick where none is left open.
    ///
    /// Magnitudes a little beyond both ends of the interval are rounded to nearest: two units in the last place of f32
    /// more than the bound cover the roundings made here. Where both give the same bf16, so does the value itself. A tie
    /// between two bf16 lies strictly inside every interval that touches it, so ties need no care. 0 and what is not finite
    /// are left open.
    #[inline(always)]
    fn round_some<const GAIN: bool>(
        &self,
        gain: f32,
        w0: &[bf16],
        sums: &[f32],
        norms: &[f32],
        out: &mut [bf16],
        doubt: &mut [u8],
        moved: &mut Moved,
    ) -> bool {
        // As wide as what it is made of: narrowed here, it would be read back wider than it was written, which stalls.
        let mut new = [0u32; CHUNK];
        let mut differences = [0u32; CHUNK];
        let mut open = 0u32;
        let lanes = w0.iter().zip(sums).zip(norms).zip(&mut new).zip(&mut differences);
        for ((((w0, sum), norm), new), difference) in lanes {
            let mut base = f32::from_bits(u32::from(w0.to_bits()) << 16);
            let mut error = self.bound * norm;
            if GAIN {
                base *= gain;
                error += SLACK * base.abs();
            }
            let value = base + sum;
            let size = value.abs();
            let far = (size + error).to_bits().wrapping_add(HALF + 2);
            let near = (size - error).to_bits().wrapping_add(HALF - 2);
            *difference = ((far ^ near) & 0xffff_0000) | (far.wrapping_add(FINITE) & (1 << 31));
            open |= *difference;
            *new = value.to_bits().wrapping_add(HALF);
        }
        let sure = open == 0;
        if sure && moved.known {
            for (out, new) in out.iter_mut().zip(&new) {
                *out = bf16::from_bits((new >> 16) as u16);
            }
            return false;
        }
        let flags = moved.changed.iter_mut().zip(&mut moved.differs);
        if sure {
            let lanes = out.iter_mut().zip(w0).zip(&new).zip(flags);
            for (((out, w0), new), (changed, differs)) in lanes {
                let new = (new >> 16) as u16;
                *changed |= out.to_bits() ^ new;
                *differs |= w0.to_bits() ^ new;
                *out = bf16::from_bits(new);
            }
        } else {
            let lanes = out.iter_mut().zip(w0).zip(&new).zip(&differences);
            for ((((out, w0), new), difference), ((changed, differs), doubt)) in lanes.zip(flags.zip(doubt)) {
                let new = (new >> 16) as u16;
                let mask = if *difference != 0 { 0 } else { 0xffff };
                *changed |= (out.to_bits() ^ new) & mask;
                *differs |= (w0.to_bits() ^ new) & mask;
                // A doubtful element keeps its former value until it is settled.
                *out = bf16::from_bits((new & mask) | (out.to_bits() & !mask));
                *doubt = !mask as u8;
            }
        }
        !sure
    }
}
