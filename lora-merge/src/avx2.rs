//! Tiles with AVX2: what is sure is told by 16-bit arithmetic, sixteen elements at a time.
//!
//! # How an element is tested
//! The f32 sum v is rounded by adding half the distance between two bf16 to its bits; the upper halves are the result.
//! The lower half then says how many units in the last place v is away from the tie below (and 65,536 less that, from
//! the one above). The error of v in such units depends on nothing but the row, the column and the exponent of v:
//!
//! ```text
//! error ≤ bound[row] · norm[column]                     as everywhere
//!       ≤ bound[row] · 2^exponent(norm[column])         one byte per column
//! units ≤ 2 + bound[row] · 2^(exponent(norm[column]) - exponent(v) + 23)
//!       = table[row][exponent(norm[column]) - exponent(v) + a constant of the task]
//! ```
//! The table has 16 places, so one shuffle of bytes reads it for 16 elements. Its first place also serves all greater
//! v, and its last one, for which nothing is sure, all smaller ones. It holds square roots, rounded upwards, since
//! bytes would otherwise span 8 exponents instead of 15.
//!
//! Between v and its result there may lie a power of two: then the exponent of the result would be too great. So the
//! exponent is that of the next smaller bf16.

use crate::block::{Block, Found};
use crate::portable::{Portable, Tiles};
use crate::tile::{GAIN_SLACK, MR, RUN, SLACK};
use core::arch::x86_64::__m256i;
use half::bf16;
use pulp::x86::V3;
use pulp::{NullaryFnOnce, Simd, f32x8};
use std::ops::Range;

/// Columns of a panel.
pub(crate) const COLUMNS: usize = 16;
/// Places of a table.
const PLACES: usize = 16;
/// Panels that are summed and rounded, then tested.
const STRIP: usize = 8;
/// Exponents of results, less one, above which they may be infinite or NaN. So is that of -0.
const EXTREME: u8 = 253;

/// What a task's tests need.
pub(crate) struct Avx2 {
    /// `[columns]`, padded to whole panels: the exponents of norms in lower bytes, so shifted that they give places.
    columns: Vec<[u16; COLUMNS]>,
    /// Factor on bounds in tables.
    scale: f32,
}

#[inline(always)]
fn bits(values: f32x8) -> __m256i {
    bytemuck::cast(values)
}

#[inline(always)]
fn load<T: bytemuck::NoUninit>(values: &T) -> __m256i {
    bytemuck::pod_read_unaligned(bytemuck::bytes_of(values))
}

#[inline(always)]
fn store(values: __m256i, to: &mut [bf16; COLUMNS]) {
    bytemuck::bytes_of_mut(to).copy_from_slice(bytemuck::bytes_of(&values));
}

impl Avx2 {
    /// `None` if a norm or a bound is too great for a byte's exponent.
    #[inline(always)]
    pub(crate) fn new(norm_exponents: &[u8], bounds: &[f32]) -> Option<Self> {
        let most = bounds
            .iter()
            .fold(f32::MIN_POSITIVE, |most, bound| most.max(*bound));
        // bound · 2^shift is at most 2^-1, so that the last place but one is at most 2^13.
        let shift = 125 - (most.to_bits() >> 23) as i32;
        // table[place] = bound · 2^(place - constant + 23)
        let constant = 23 - shift;
        let extremes = |(least, most): (u8, u8), e: &u8| (least.min(*e), most.max(*e));
        let (least, greatest) = norm_exponents.iter().fold((u8::MAX, 0), extremes);
        if i32::from(least) + constant < 0 || i32::from(greatest) + constant > 255 {
            return None;
        }
        let mut columns = vec![[0; COLUMNS]; norm_exponents.len().div_ceil(COLUMNS)];
        for (column, exponent) in columns.as_flattened_mut().iter_mut().zip(norm_exponents) {
            // The upper byte keeps away from the table, whatever the sign.
            *column = 0xff00 | (u16::from(*exponent).wrapping_add(constant as u16));
        }
        Some(Self {
            columns,
            scale: 2f32.powi(shift),
        })
    }

    #[inline(always)]
    fn table(&self, simd: V3, bound: f32, slack: u32) -> __m256i {
        let (scaled, slack) = (simd.splat_f32s(bound * self.scale), simd.splat_f32s(slack as f32));
        // Rounded upwards, and more than the roundings here.
        let roots = |doubled: f32x8| {
            let units = simd.mul_add_f32s(scaled, doubled, slack);
            let root = simd.add_f32s(simd.sqrt_f32s(units), simd.splat_f32s(1.0));
            simd.avx._mm256_cvttps_epi32(bytemuck::cast(root))
        };
        let low = roots(f32x8(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0));
        let high = roots(f32x8(
            256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
        ));
        let mut table = [0u8; 2 * PLACES];
        let roots: [[u32; 8]; 2] = [bytemuck::cast(low), bytemuck::cast(high)];
        for (place, root) in roots.as_flattened().iter().enumerate() {
            let root = if place == PLACES - 1 { u8::MAX } else { *root as u8 };
            table[place] = root;
            table[PLACES + place] = root;
        }
        load(&table)
    }
}

/// Sixteen elements rounded, and the lower halves of the sums that were cut off.
#[inline(always)]
fn round<const GAIN: bool>(simd: V3, word: __m256i, sums: Sums, gain: f32x8) -> (__m256i, __m256i) {
    let half = simd.avx._mm256_set1_epi32(0x8000);
    let zero = simd.avx._mm256_setzero_si256();
    let even = simd.avx2._mm256_slli_epi32::<16>(word);
    let odd = simd.avx2._mm256_blend_epi16::<0xaa>(zero, word);
    let (mut even, mut odd) = (bytemuck::cast(even), bytemuck::cast(odd));
    if GAIN {
        even = simd.mul_f32s(even, gain);
        odd = simd.mul_f32s(odd, gain);
    }
    let even = simd
        .avx2
        ._mm256_add_epi32(bits(simd.add_f32s(even, sums[0])), half);
    let odd = simd
        .avx2
        ._mm256_add_epi32(bits(simd.add_f32s(odd, sums[1])), half);
    let new = simd
        .avx2
        ._mm256_blend_epi16::<0xaa>(simd.avx2._mm256_srli_epi32::<16>(even), odd);
    let low = simd
        .avx2
        ._mm256_blend_epi16::<0xaa>(even, simd.avx2._mm256_slli_epi32::<16>(odd));
    (new, low)
}

/// Words that are not 0 where nothing is sure, and exponents of results, less one, in lower bytes.
#[inline(always)]
fn test(simd: V3, new: __m256i, low: __m256i, table: __m256i, columns: __m256i) -> (__m256i, __m256i) {
    let distance = simd.avx2._mm256_abs_epi16(low);
    let smaller = simd.avx2._mm256_subs_epu16(new, simd.avx._mm256_set1_epi16(1));
    let exponents = simd.avx2._mm256_srli_epi16::<7>(smaller);
    let place = simd.avx2._mm256_subs_epu8(columns, exponents);
    let last = simd.avx._mm256_set1_epi16(0xff0fu16 as i16);
    let place = simd.avx2._mm256_min_epu8(place, last);
    let root = simd.avx2._mm256_shuffle_epi8(table, place);
    let units = simd.avx2._mm256_mullo_epi16(root, root);
    (simd.avx2._mm256_subs_epu16(units, distance), exponents)
}

/// Sums of a panel of a row: even columns and odd ones.
type Sums = [f32x8; 2];

/// Adds `left · right`, of `[k][MR]` and `[k][COLUMNS]`. As `tile::multiply`, which knows no sizes of lines and with which a
/// merge of low rank takes a third longer.
#[inline(always)]
fn multiply_run(simd: V3, left: &[[f32; MR]], right: &[[f32; COLUMNS]]) -> [Sums; MR] {
    const UNROLLED: usize = 4;
    let mut sums = [[simd.splat_f32s(0.0); 2]; MR];
    let (left_many, left_rest) = left.as_chunks::<UNROLLED>();
    let (right_many, right_rest) = right.as_chunks::<UNROLLED>();
    for (left, right) in left_many.iter().zip(right_many) {
        for k in 0..UNROLLED {
            add_products(simd, &left[k], &right[k], &mut sums);
        }
    }
    for (left, right) in left_rest.iter().zip(right_rest) {
        add_products(simd, left, right, &mut sums);
    }
    sums
}

#[inline(always)]
fn add_products(simd: V3, left: &[f32; MR], right: &[f32; COLUMNS], sums: &mut [Sums; MR]) {
    let right: Sums = bytemuck::cast(*right);
    for row in 0..MR {
        let left = simd.splat_f32s(left[row]);
        for parity in 0..2 {
            sums[row][parity] = simd.mul_add_f32s(left, right[parity], sums[row][parity]);
        }
    }
}

#[inline(always)]
fn multiply(simd: V3, left: &[[f32; MR]], right: &[[f32; COLUMNS]]) -> [Sums; MR] {
    if left.len() <= RUN {
        return multiply_run(simd, left, right);
    }
    let mut sums = [[simd.splat_f32s(0.0); 2]; MR];
    for (left, right) in left.chunks(RUN).zip(right.chunks(RUN)) {
        let more = multiply_run(simd, left, right);
        for row in 0..MR {
            for parity in 0..2 {
                sums[row][parity] = simd.add_f32s(sums[row][parity], more[row][parity]);
            }
        }
    }
    sums
}

#[inline(always)]
fn any(simd: V3, bits: __m256i) -> bool {
    simd.avx._mm256_testz_si256(bits, bits) == 0
}

#[inline(always)]
fn or(simd: V3, a: __m256i, b: __m256i) -> __m256i {
    simd.avx2._mm256_or_si256(a, b)
}

/// What stays the same for a group of rows.
struct Group<'a> {
    simd: V3,
    block: &'a Block<'a>,
    left: &'a [[f32; MR]],
    tables: [__m256i; MR],
    gains: [f32x8; MR],
    /// The first row within the task.
    first: usize,
}

impl Group<'_> {
    /// Sums and rounds `N` panels, tests them, and computes again what is not sure.
    #[inline(always)]
    fn strip<const GAIN: bool, const LOOK: bool, const N: usize>(
        &self,
        column: usize,
        right: &[[f32; COLUMNS]],
        columns: &[[u16; COLUMNS]; N],
        w0: [&[[bf16; COLUMNS]; N]; MR],
        out: [&mut [[bf16; COLUMNS]; N]; MR],
        buffers: &mut Buffers,
        found: &mut Found,
    ) {
        let simd = self.simd;
        let rank = self.left.len();
        for (panel, right) in right.chunks_exact(rank).enumerate().take(N) {
            let sums = multiply(simd, self.left, right);
            for row in 0..MR {
                if LOOK {
                    buffers.former[row][panel] = load(&out[row][panel]);
                }
                let word = load(&w0[row][panel]);
                let (new, low) = round::<GAIN>(simd, word, sums[row], self.gains[row]);
                store(new, &mut out[row][panel]);
                buffers.low[row][panel] = low;
            }
        }
        for (row, out) in out.into_iter().enumerate() {
            let open = &mut buffers.low[row];
            let (mut all, mut greatest) = (simd.avx._mm256_setzero_si256(), simd.avx._mm256_setzero_si256());
            for panel in 0..N {
                let columns = load(&columns[panel]);
                let (more, exponents) = test(simd, load(&out[panel]), open[panel], self.tables[row], columns);
                open[panel] = more;
                all = or(simd, all, more);
                greatest = simd.avx2._mm256_max_epu8(greatest, exponents);
            }
            let extreme = simd
                .avx2
                ._mm256_subs_epu8(greatest, simd.avx._mm256_set1_epi8(EXTREME as i8));
            if any(simd, or(simd, all, extreme)) {
                let at = (self.first + row, column);
                self.settle(at, any(simd, extreme), &open[..N], w0[row], out, found);
            }
            if LOOK {
                let (mut changed, mut differs) =
                    (simd.avx._mm256_setzero_si256(), simd.avx._mm256_setzero_si256());
                for panel in 0..N {
                    let new = load(&out[panel]);
                    let former = buffers.former[row][panel];
                    changed = or(simd, changed, simd.avx2._mm256_xor_si256(former, new));
                    differs = or(
                        simd,
                        differs,
                        simd.avx2._mm256_xor_si256(load(&w0[row][panel]), new),
                    );
                }
                found.changed |= any(simd, changed);
                found.differs |= any(simd, differs);
            }
        }
    }

    /// Computes again what is open, and what is 0, infinite or NaN if `extreme`. `at` is the row within the task and the first column.
    #[cold]
    #[inline(never)]
    fn settle(
        &self,
        at: (usize, usize),
        extreme: bool,
        open: &[__m256i],
        w0: &[[bf16; COLUMNS]],
        out: &mut [[bf16; COLUMNS]],
        found: &mut Found,
    ) {
        let (simd, block) = (self.simd, self.block);
        simd.vectorize(Settle {
            simd,
            block,
            at,
            extreme,
            open,
            w0,
            out,
            found,
        });
    }
}

/// What a strip leaves in L1.
struct Buffers {
    /// Lower halves of sums, then what is open.
    low: [[__m256i; STRIP]; MR],
    /// What the results overwrote.
    former: [[__m256i; STRIP]; MR],
}

struct Settle<'a> {
    simd: V3,
    block: &'a Block<'a>,
    at: (usize, usize),
    extreme: bool,
    open: &'a [__m256i],
    w0: &'a [[bf16; COLUMNS]],
    out: &'a mut [[bf16; COLUMNS]],
    found: &'a mut Found,
}

impl NullaryFnOnce for Settle<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let zero = self.simd.avx._mm256_setzero_si256();
        for (panel, ((open, w0), out)) in self.open.iter().zip(self.w0).zip(self.out).enumerate() {
            let sure = self.simd.avx2._mm256_cmpeq_epi16(*open, zero);
            // Two bits for each element.
            let mut open = !self.simd.avx2._mm256_movemask_epi8(sure) as u32;
            if self.extreme {
                for (i, out) in out.iter().enumerate() {
                    let is_extreme = !out.is_finite() || *out == bf16::ZERO;
                    open |= u32::from(is_extreme) << (2 * i);
                }
            }
            while open != 0 {
                let i = open.trailing_zeros() as usize / 2;
                open &= !(0b11 << (2 * i));
                let at = (self.at.0, self.at.1 + panel * COLUMNS + i);
                out[i] = self.block.settle_one::<COLUMNS>(at, w0[i], self.found);
            }
        }
    }
}

impl Tiles<V3, 1, COLUMNS> for &Avx2 {
    #[inline(always)]
    fn tiles<const GAIN: bool, const LOOK: bool>(
        self,
        simd: V3,
        block: &Block<'_>,
        left: &[f32],
        first: usize,
        factors: &[(f32, f32); MR],
        panels: Range<usize>,
        (w0, out): ([&[bf16]; MR], [&mut [bf16]; MR]),
        found: &mut Found,
    ) {
        let zero = simd.avx._mm256_setzero_si256();
        let mut group = Group {
            simd,
            block,
            left: left.as_chunks::<MR>().0,
            tables: [zero; MR],
            gains: [simd.splat_f32s(1.0); MR],
            first,
        };
        for (row, (bound, gain)) in factors.iter().enumerate() {
            group.tables[row] = self.table(simd, *bound, if GAIN { GAIN_SLACK } else { SLACK });
            group.gains[row] = simd.splat_f32s(*gain);
        }
        let first_column = panels.start * COLUMNS;
        let elements = first_column..panels.end * COLUMNS;
        let (right, _) = block.panels.range::<COLUMNS>(panels.clone());
        let (right, _) = right.as_chunks::<COLUMNS>();
        let rank = block.panels.total_rank;
        let columns = &self.columns[panels];
        let w0 = w0.map(|row| row[elements.clone()].as_chunks::<COLUMNS>().0);
        let mut out = out.map(|row| row[elements.clone()].as_chunks_mut::<COLUMNS>().0);
        let mut buffers = Buffers {
            low: [[zero; STRIP]; MR],
            former: [[zero; STRIP]; MR],
        };
        macro_rules! strips {
            ($n:expr, $starts:expr) => {
                for start in $starts.step_by($n) {
                    const SAME: &str = "all are as long as the columns";
                    let mut each_out = out.iter_mut();
                    group.strip::<GAIN, LOOK, { $n }>(
                        first_column + start * COLUMNS,
                        &right[start * rank..][..$n * rank],
                        columns[start..][..$n].try_into().expect(SAME),
                        std::array::from_fn(|row| w0[row][start..][..$n].try_into().expect(SAME)),
                        std::array::from_fn(|_| {
                            let out = each_out.next().expect("there are as many rows");
                            (&mut out[start..][..$n]).try_into().expect(SAME)
                        }),
                        &mut buffers,
                        found,
                    );
                }
            };
        }
        let whole = columns.len() - columns.len() % STRIP;
        strips!(STRIP, (0..whole));
        strips!(1, (whole..columns.len()));
    }
}

/// Merges a task's rows.
pub(crate) struct WithAvx2<'a>(pub(crate) V3, pub(crate) Block<'a>);

impl NullaryFnOnce for WithAvx2<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self(simd, block) = self;
        let left = block.pack_left();
        match Avx2::new(&block.panels.exponents, &left.bounds) {
            Some(tiles) => block.run_with::<V3, 1, COLUMNS, _>(simd, &left, &tiles),
            None => block.run_with::<V3, 1, COLUMNS, _>(simd, &left, Portable),
        }
    }
}
