//! Random tensors, scrambled page tables and comparison with the oracle.
#![allow(dead_code, reason = "each test binary uses a part")]

use block_mask::reference::{DenseShape, dense_attention};
use block_mask::{BlockMask, FlexOptions, MaskMod, Physical, QueryView, ScoreMod, flex_attention};
use half::bf16;
use paged_kv::{KvCache, KvDtype, KvLayout, PageTable, PageTableConfig, Slot};

/// A small generator: tests need repeatable numbers, not good ones.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 33) as usize) % n
    }

    /// Uniform in −1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// Keys and values of some sequences, `[kv_heads, len, head_dim]` each.
#[derive(Clone)]
pub(crate) struct Sequences {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) lens: Vec<usize>,
    pub(crate) k: Vec<Vec<f32>>,
    pub(crate) v: Vec<Vec<f32>>,
}

impl Sequences {
    pub(crate) fn random(
        random: &mut Random,
        lens: &[usize],
        kv_heads: usize,
        head_dim: usize,
        dtype: KvDtype,
    ) -> Sequences {
        let mut tensors = || -> Vec<Vec<f32>> {
            lens.iter()
                .map(|len| {
                    let values = random
                        .floats(kv_heads * len * head_dim)
                        .into_iter()
                        .map(|x| 2.0 * x);
                    // Values that the cache can hold exactly, so that rounding is not what a test measures.
                    match dtype {
                        KvDtype::F32 => values.collect(),
                        KvDtype::Bf16 => values.map(|x| bf16::from_f32(x).to_f32()).collect(),
                    }
                })
                .collect()
        };
        let (k, v) = (tensors(), tensors());
        Sequences {
            kv_heads,
            head_dim,
            lens: lens.to_vec(),
            k,
            v,
        }
    }
}

/// The sequences in a paged cache, pages and slots placed by `seed`. Whatever they do not own holds NaN, and so do the
/// unused places of their last pages.
pub(crate) struct Placed {
    pub(crate) table: PageTable,
    pub(crate) cache: KvCache,
    pub(crate) slots: Vec<Slot>,
}

pub(crate) fn place(sequences: &Sequences, page_size: usize, dtype: KvDtype, seed: u64) -> Placed {
    let mut random = Random::new(seed);
    let pages_of = |len: usize| len.div_ceil(page_size);
    let longest = sequences
        .lens
        .iter()
        .copied()
        .map(pages_of)
        .max()
        .unwrap_or(0)
        .max(4);
    let total: usize = sequences.lens.iter().copied().map(pages_of).sum();
    let n_slots = sequences.lens.len() + 6;
    let n_pages = total + 1 + 4 * 4;
    let config = PageTableConfig {
        n_pages,
        page_size,
        n_slots,
        max_pages_per_slot: longest,
    };
    let mut table = PageTable::new(config).unwrap();
    // Strangers take slots and pages first and leave some of them again.
    let mut strangers = Vec::new();
    for _ in 0..1 + random.below(4) {
        let slot = table.allocate_slot().unwrap();
        let _ = table.reserve(slot, (1 + random.below(4)) * page_size).unwrap();
        strangers.push(slot);
    }
    random.shuffle(&mut strangers);
    for slot in strangers.drain(..strangers.len() / 2) {
        table.erase(slot).unwrap();
    }
    let mut order: Vec<usize> = (0..sequences.lens.len()).collect();
    random.shuffle(&mut order);
    let mut slots = vec![Slot::RESERVED; order.len()];
    for &i in &order {
        slots[i] = table.allocate_slot().unwrap();
    }
    // Slots grow in turns, so that no sequence has neighbouring pages throughout.
    let mut growth: Vec<usize> = sequences
        .lens
        .iter()
        .enumerate()
        .flat_map(|(i, len)| std::iter::repeat_n(i, pages_of(*len)))
        .collect();
    random.shuffle(&mut growth);
    let mut reserved = vec![0; slots.len()];
    for i in growth {
        reserved[i] += page_size;
        let _ = table.reserve(slots[i], reserved[i]).unwrap();
    }
    table.check_integrity().unwrap();

    let layout = KvLayout {
        n_layers: 2,
        kv_heads: sequences.kv_heads,
        head_dim: sequences.head_dim,
        n_pages,
        page_size,
        dtype,
    };
    let mut cache = KvCache::new(layout).unwrap();
    cache.fill(f32::NAN);
    let mut placed = Placed { table, cache, slots };
    for i in 0..sequences.lens.len() {
        placed.write(sequences, i);
    }
    placed
}

impl Placed {
    /// Writes sequence `i` and advances its slot over it.
    fn write(&mut self, sequences: &Sequences, i: usize) {
        let (len, dim, heads) = (sequences.lens[i], sequences.head_dim, sequences.kv_heads);
        let token_major = |x: &[f32]| -> Vec<f32> {
            let at = |t: usize, h: usize| x[(h * len + t) * dim..(h * len + t + 1) * dim].iter().copied();
            (0..len)
                .flat_map(|t| (0..heads).flat_map(move |h| at(t, h)).collect::<Vec<_>>())
                .collect()
        };
        let physical: Vec<usize> = (0..len)
            .map(|t| self.table.physical(self.slots[i], t).unwrap())
            .collect();
        self.cache
            .write(
                1,
                &physical,
                &token_major(&sequences.k[i]),
                &token_major(&sequences.v[i]),
            )
            .unwrap();
        self.table.advance(self.slots[i], len).unwrap();
    }
}

/// Output and log-sum-exp of `flex_attention` on layer 1, poisoned first.
pub(crate) fn attend(
    q: QueryView<'_>,
    placed: &Placed,
    mask: &BlockMask<Physical>,
    score_mod: Option<&ScoreMod>,
) -> (Vec<f32>, Vec<f32>) {
    let mut out = vec![f32::NAN; q.output_len()];
    let mut lse = vec![f32::NAN; q.lse_len()];
    let kv = placed.cache.layer(1).unwrap();
    flex_attention(
        q,
        kv,
        mask,
        score_mod,
        &FlexOptions::default(),
        &mut out,
        Some(&mut lse),
    )
    .unwrap();
    (out, lse)
}

/// The oracle for one sequence: queries `[heads, q_len, head_dim]` whose first lies at `position`.
pub(crate) fn oracle(
    sequences: &Sequences,
    i: usize,
    q: &[f32],
    heads: usize,
    position: usize,
    mask_mod: &MaskMod,
    score_mod: Option<&ScoreMod>,
) -> (Vec<f64>, Vec<f64>) {
    let dim = sequences.head_dim;
    let shape = DenseShape {
        batch: 1,
        heads,
        kv_heads: sequences.kv_heads,
        q_len: q.len() / (heads * dim),
        kv_len: sequences.lens[i],
        head_dim: dim,
    };
    dense_attention(
        shape,
        q,
        &sequences.k[i],
        &sequences.v[i],
        1.0 / (dim as f64).sqrt(),
        |_, h, q, kv| mask_mod.allows(i, h, position + q, kv),
        |score, _, h, q, kv| match score_mod {
            Some(score_mod) => f64::from(score_mod.eval(score as f32, i, h, position + q, kv)),
            None => score,
        },
    )
    .unwrap()
}

/// Values agree within f32 rounding of sums of this size; −∞ and 0 of empty rows exactly.
pub(crate) fn assert_close(found: &[f32], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        if expected.is_infinite() {
            assert_eq!(f64::from(found), expected, "{what}: element {i}");
        } else {
            let bound = 5e-6 * expected.abs().max(1.0);
            assert!(
                (f64::from(found) - expected).abs() <= bound,
                "{what}: element {i} is {found}, not {expected}"
            );
        }
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
