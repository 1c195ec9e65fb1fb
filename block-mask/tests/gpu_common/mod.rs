//! Random paged sequences on a device, and the two references of the ≤ 2× rule.
#![allow(dead_code, reason = "each test binary uses its own part")]

use block_mask::cuda::AttentionShape;
use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
use half::bf16;
use paged_kv::{PageTable, PageTableConfig, Slot};

/// splitmix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x9E37_79B9)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// 0..n
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// low..=high
    pub(crate) fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i + 1));
        }
    }

    /// About normal: the sum of 12 uniform numbers less its mean.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12)
            .map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32)
            .sum::<f32>()
            - 6.0
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<bf16> {
        (0..n).map(|_| bf16::from_f32(self.normal())).collect()
    }
}

pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) compiler: Compiler,
}

pub(crate) fn gpu() -> Gpu {
    let device = Device::open(0).expect("a CUDA device");
    let stream = Stream::new(&device).expect("a stream");
    Gpu {
        device,
        stream,
        compiler: Compiler::new().expect("NVRTC"),
    }
}

/// Keys and values of some sequences, `[kv_heads, len, head_dim]` each.
pub(crate) struct Sequences {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) page_size: usize,
    pub(crate) lens: Vec<usize>,
    pub(crate) k: Vec<Vec<bf16>>,
    pub(crate) v: Vec<Vec<bf16>>,
}

/// The same sequences in pages: where they lie changes with every call of [`Sequences::place`].
pub(crate) struct Placed {
    pub(crate) table: PageTable,
    pub(crate) slots: Vec<Slot>,
    pub(crate) k: DeviceBuffer<bf16>,
    pub(crate) v: DeviceBuffer<bf16>,
    pub(crate) rows: DeviceBuffer<i32>,
}

impl Sequences {
    pub(crate) fn new(
        random: &mut Random,
        kv_heads: usize,
        head_dim: usize,
        page_size: usize,
        lens: &[usize],
    ) -> Sequences {
        let mut draw = || {
            lens.iter()
                .map(|len| random.values(kv_heads * len * head_dim))
                .collect::<Vec<_>>()
        };
        let (k, v) = (draw(), draw());
        Sequences {
            kv_heads,
            head_dim,
            page_size,
            lens: lens.to_vec(),
            k,
            v,
        }
    }

    pub(crate) fn pages(&self, len: usize) -> usize {
        len.div_ceil(self.page_size)
    }

    pub(crate) fn shape(&self, group: usize) -> AttentionShape {
        AttentionShape {
            heads: group * self.kv_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            page_size: self.page_size,
            n_pages: self.config().n_pages,
        }
    }

    pub(crate) fn config(&self) -> PageTableConfig {
        let pages: usize = self.lens.iter().map(|&len| self.pages(len)).sum();
        let longest = self.lens.iter().copied().max().unwrap_or(1);
        let n_pages = pages + 4;
        PageTableConfig {
            n_pages,
            page_size: self.page_size,
            n_slots: n_pages + self.lens.len() + 2,
            max_pages_per_slot: self.pages(longest) + 1,
        }
    }

    /// Random slots and random, interleaved pages; everything that no sequence owns is NaN, page 0 and the tails of last
    /// pages included.
    pub(crate) fn place(&self, gpu: &Gpu, random: &mut Random) -> Placed {
        let config = self.config();
        let mut table = PageTable::new(config).unwrap();
        // One slot for every page, given back in random order, makes the free lists random.
        let mut holders: Vec<Slot> = (1..config.n_slots)
            .map(|_| table.allocate_slot().unwrap())
            .collect();
        for &holder in &holders[..config.n_pages - 1] {
            let _ = table.reserve(holder, 1).unwrap();
        }
        random.shuffle(&mut holders);
        holders
            .into_iter()
            .for_each(|holder| table.erase(holder).unwrap());
        let slots: Vec<Slot> = self.lens.iter().map(|_| table.allocate_slot().unwrap()).collect();
        let mut wanted: Vec<usize> = self
            .lens
            .iter()
            .enumerate()
            .flat_map(|(i, &len)| vec![i; self.pages(len)])
            .collect();
        random.shuffle(&mut wanted);
        let mut reserved = vec![0; slots.len()];
        for i in wanted {
            reserved[i] = (reserved[i] + self.page_size).min(self.lens[i].next_multiple_of(self.page_size));
            let _ = table.reserve(slots[i], reserved[i]).unwrap();
        }
        for (slot, &len) in slots.iter().zip(&self.lens) {
            table.advance(*slot, len).unwrap();
        }
        self.store(gpu, table, slots)
    }

    /// One sequence after the other, in neighbouring pages.
    #[allow(dead_code, reason = "for masks alone")]
    pub(crate) fn place_in_order(&self, gpu: &Gpu) -> Placed {
        let mut table = PageTable::new(self.config()).unwrap();
        let place = |&len: &usize| {
            let slot = table.allocate_slot().unwrap();
            let _ = table.reserve(slot, len).unwrap();
            table.advance(slot, len).unwrap();
            slot
        };
        let slots = self.lens.iter().map(place).collect();
        self.store(gpu, table, slots)
    }

    /// Keys and values where the table says; all else is NaN.
    fn store(&self, gpu: &Gpu, table: PageTable, slots: Vec<Slot>) -> Placed {
        table.check_integrity().unwrap();
        let positions = table.n_pages() * self.page_size;
        let scatter = |of: &[Vec<bf16>]| {
            let mut out = vec![bf16::NAN; self.kv_heads * positions * self.head_dim];
            for (i, values) in of.iter().enumerate() {
                for t in 0..self.lens[i] {
                    let place = table.physical(slots[i], t).unwrap();
                    for h in 0..self.kv_heads {
                        let from = (h * self.lens[i] + t) * self.head_dim;
                        let to = (h * positions + place) * self.head_dim;
                        out[to..to + self.head_dim].copy_from_slice(&values[from..from + self.head_dim]);
                    }
                }
            }
            DeviceBuffer::from_slice(&gpu.stream, &out).unwrap()
        };
        let (k, v) = (scatter(&self.k), scatter(&self.v));
        let rows = DeviceBuffer::from_slice(&gpu.stream, table.rows()).unwrap();
        Placed {
            table,
            slots,
            k,
            v,
            rows,
        }
    }

    /// Attention of one query over sequence `i`, in f64 and by the plain bf16 formula: scores and weights rounded to
    /// bf16, sums in f32. `score` returns `None` for a hidden key.
    pub(crate) fn attend(
        &self,
        i: usize,
        kv_head: usize,
        q: &[bf16],
        scale: f32,
        score: &dyn Fn(f32, usize) -> Option<f32>,
    ) -> Answer {
        let (len, d) = (self.lens[i], self.head_dim);
        let row = |x: &'_ [Vec<bf16>], t: usize| -> Vec<f32> {
            x[i][(kv_head * len + t) * d..][..d]
                .iter()
                .map(|x| x.to_f32())
                .collect()
        };
        let q: Vec<f32> = q.iter().map(|x| x.to_f32()).collect();
        let (mut exact, mut plain) = (Vec::new(), Vec::new());
        for t in 0..len {
            let k = row(&self.k, t);
            let dot: f64 = q.iter().zip(&k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            // Functions are f32 on both sides; the f64 score goes through them rounded once.
            let seen = score((dot * f64::from(scale)) as f32, t);
            let Some(value) = seen else { continue };
            let identity = value == (dot * f64::from(scale)) as f32;
            exact.push((
                t,
                if identity {
                    dot * f64::from(scale)
                } else {
                    f64::from(value)
                },
            ));
            let rounded = bf16::from_f32(dot as f32).to_f32() * scale;
            plain.push((t, score(rounded, t).unwrap_or(f32::NEG_INFINITY)));
        }
        let mut answer = Answer {
            exact: vec![0.0; d],
            plain: vec![0.0; d],
            lse: f64::NEG_INFINITY,
        };
        if exact.is_empty() {
            return answer;
        }
        let max = exact.iter().map(|x| x.1).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = exact.iter().map(|x| (x.1 - max).exp()).sum();
        answer.lse = max + sum.ln();
        let plain_max = plain.iter().map(|x| x.1).fold(f32::NEG_INFINITY, f32::max);
        let plain_sum: f32 = plain.iter().map(|x| (x.1 - plain_max).exp()).sum();
        let mut sums = vec![0.0f32; d];
        for (&(t, x), &(_, y)) in exact.iter().zip(&plain) {
            let v = row(&self.v, t);
            let weight = (x - max).exp() / sum;
            let plain_weight = bf16::from_f32((y - plain_max).exp() / plain_sum).to_f32();
            for e in 0..d {
                answer.exact[e] += weight * f64::from(v[e]);
                sums[e] += plain_weight * v[e];
            }
        }
        answer.plain = sums
            .iter()
            .map(|&x| f64::from(bf16::from_f32(x).to_f32()))
            .collect();
        answer
    }
}

/// One row's references.
pub(crate) struct Answer {
    pub(crate) exact: Vec<f64>,
    pub(crate) plain: Vec<f64>,
    pub(crate) lse: f64,
}

/// Collects rows and applies the rule: the kernel's largest error is at most twice the plain formula's, and so is the
/// mean one.
#[derive(Default)]
pub(crate) struct Errors {
    kernel: f64,
    plain: f64,
    kernel_sum: f64,
    plain_sum: f64,
    n: usize,
}

impl Errors {
    pub(crate) fn add(&mut self, what: &str, out: &[bf16], lse: Option<f32>, answer: &Answer) {
        for (e, value) in out.iter().enumerate() {
            let got = f64::from(value.to_f32());
            assert!(got.is_finite(), "{what}: element {e} is {got}");
            let (kernel, plain) = (
                (got - answer.exact[e]).abs(),
                (answer.plain[e] - answer.exact[e]).abs(),
            );
            self.kernel = self.kernel.max(kernel);
            self.plain = self.plain.max(plain);
            self.kernel_sum += kernel;
            self.plain_sum += plain;
            self.n += 1;
        }
        if let Some(lse) = lse {
            let same = f64::from(lse) == answer.lse;
            let near = (f64::from(lse) - answer.lse).abs() < 2e-3 + 1e-4 * answer.lse.abs();
            assert!(
                same || near,
                "{what}: log-sum-exp is {lse}, should be {}",
                answer.lse
            );
        }
    }

    pub(crate) fn check(&self, what: &str) {
        assert!(self.n > 0, "{what}: nothing was compared");
        let floor = 1e-6;
        assert!(
            self.kernel <= 2.0 * self.plain + floor,
            "{what}: largest error {:.2e}, that of the bf16 formula {:.2e}",
            self.kernel,
            self.plain
        );
        let (kernel, plain) = (self.kernel_sum / self.n as f64, self.plain_sum / self.n as f64);
        assert!(
            kernel <= 2.0 * plain + floor,
            "{what}: mean error {kernel:.2e}, that of the bf16 formula {plain:.2e}"
        );
    }
}

pub(crate) fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|x| x.to_bits()).collect()
}
