//! Adapters beside their base weights: the tables of what every policy adds, and the two products with them.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{
    Compiler, Device, DeviceBuffer, DeviceSlice, Header, Kernel, KernelSpec, LaunchConfig, Limits, Stream,
};
use half::bf16;
use lora_merge::UnmergedUpdate;

use super::four_bit::ProductOutput;
use super::{aligned, refuse, same, small, spec};
use crate::Result;

/// Ranks are filled up to multiples of this.
pub const RANK_QUANTUM: usize = 32;
/// Most parts of a fused product.
pub const MAX_PARTS: usize = 3;

const UP_WARPS: usize = 8;
const UP_ROWS: usize = 32;
const DOWN_WARPS: u32 = 16;
const DOWN_ROWS: usize = 16;
const ENTRY_WORDS: usize = 5;
pub(super) const HEADER: Header = Header::new("unmerged.cuh", include_str!("../../kernels/unmerged.cuh"));

/// The kernels of this file.
pub(super) fn specs() -> Vec<KernelSpec> {
    vec![
        spec("unmerged_down", include_str!("../../kernels/unmerged_down.cu"))
            .headers([HEADER])
            .entry("unmerged_down", Limits::registers(128)),
        spec("unmerged_up", include_str!("../../kernels/unmerged_up.cu"))
            .headers([HEADER])
            .entry("unmerged_up", Limits::registers(100)),
    ]
}

/// Shape of a product that adapters add to: `k` inputs, and outputs in up to [`MAX_PARTS`] parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Input features; a multiple of 8.
    pub k: usize,
    /// Output features of each part; multiples of 16.
    pub parts: Vec<usize>,
}

impl Site {
    /// Output features of all parts.
    pub fn n(&self) -> usize {
        self.parts.iter().sum()
    }
}

/// What one policy adds to one part of a site. Empty for nothing of the kind.
#[derive(Debug, Clone, Default)]
pub struct PartUpdate {
    /// A multiple of [`RANK_QUANTUM`].
    pub rank: usize,
    /// `[rank, k]`.
    pub a: Vec<bf16>,
    /// `[rows, rank]`, scaled.
    pub b: Vec<bf16>,
    /// `[rows]`, factors on the base product.
    pub gain: Vec<f32>,
    /// `[rows]`.
    pub bias: Vec<f32>,
}

impl PartUpdate {
    /// An update with its factors rounded to bf16 and its rank filled up with zeros.
    ///
    /// # Errors
    /// [`FactorNotFinite`](lora_merge::Error::FactorNotFinite), with `module` empty, for a factor that is finite in f32 but
    /// not in bf16. Panics: none.
    pub(crate) fn rounded(update: UnmergedUpdate, bias: Option<Vec<f32>>) -> Result<Self, lora_merge::Error> {
        let UnmergedUpdate { rank, a, b, gain, .. } = update;
        let cols = a.len().checked_div(rank).unwrap_or(0);
        let padded = rank.next_multiple_of(RANK_QUANTUM);
        let mut a = rounded("lora_A", &a, cols)?;
        a.resize(padded * cols, bf16::ZERO);
        let narrow = rounded("lora_B", &b, rank)?;
        let mut b = Vec::with_capacity(narrow.len().checked_div(rank).unwrap_or(0) * padded);
        // A rank of 0 has no rows.
        for row in narrow.chunks_exact(rank.max(1)) {
            b.extend_from_slice(row);
            b.resize(b.len() + padded - rank, bf16::ZERO);
        }
        Ok(Self {
            rank: padded,
            a,
            b,
            gain: gain.unwrap_or_default(),
            bias: bias.unwrap_or_default(),
        })
    }
}

/// A factor `[_, columns]` in bf16. Its greatest number is less than f32's: what lies between rounds to an infinity.
fn rounded(factor: &'static str, values: &[f32], columns: usize) -> Result<Vec<bf16>, lora_merge::Error> {
    let rounded: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
    match rounded.iter().position(|v| !v.is_finite()) {
        None => Ok(rounded),
        Some(index) => Err(lora_merge::Error::FactorNotFinite {
            module: String::new(),
            factor,
            row: index / columns,
            column: index % columns,
            format: "bf16",
        }),
    }
}

/// What every policy adds to every site, on the device. What kernels read first is at an address that never changes, so
/// captured graphs follow [`replace`](Self::replace).
#[derive(Debug)]
pub struct UnmergedTables {
    /// `[sites, policies, parts of the site, 5]`: addresses of A, B, gain and bias, and the rank.
    entries: DeviceBuffer<u64>,
    /// What the addresses point to.
    values: DeviceBuffer<u32>,
    sites: Vec<Site>,
    policies: usize,
    /// Largest rank that [`replace`](Self::replace) takes.
    max_rank: usize,
    /// See [`is_low_rank`](Self::is_low_rank).
    low_rank: bool,
}

/// Rows' slots, and the policy of each slot.
#[derive(Debug, Clone, Copy)]
pub struct RowPolicies<'a> {
    /// `[m]`.
    pub slots: DeviceSlice<'a, i32>,
    /// `[n_slots]`, −1 for none.
    pub policy_of_slot: DeviceSlice<'a, i32>,
}

impl UnmergedTables {
    /// Tables without any adapter, for up to `policies` policies of ranks up to `max_rank`.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for a shape that the kernels do not take;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn new(device: &Device, sites: Vec<Site>, policies: usize, max_rank: usize) -> Result<Self> {
        for site in &sites {
            let (n_parts, k) = (site.parts.len(), site.k);
            if n_parts == 0 || n_parts > MAX_PARTS {
                return refuse("parts", format!("are {n_parts}; 1 to {MAX_PARTS} are possible"));
            }
            if k == 0 || !k.is_multiple_of(8) {
                return refuse(
                    "k",
                    format!("is {k}; adapters at run time need a multiple of 8 on CUDA"),
                );
            }
            if let Some(rows) = site.parts.iter().find(|rows| !rows.is_multiple_of(16)) {
                return refuse(
                    "parts",
                    format!("one has {rows} rows; adapters at run time need multiples of 16 on CUDA"),
                );
            }
        }
        if max_rank == 0 || !max_rank.is_multiple_of(RANK_QUANTUM) {
            return refuse(
                "max_rank",
                format!("is {max_rank}, no multiple of {RANK_QUANTUM}"),
            );
        }
        let entries: usize = sites.iter().map(|site| policies * site.parts.len()).sum();
        Ok(Self {
            entries: DeviceBuffer::zeroed(device, (entries * ENTRY_WORDS).max(1))?,
            values: DeviceBuffer::zeroed(device, 1)?,
            sites,
            policies,
            max_rank,
            low_rank: true,
        })
    }

    /// Most policies.
    pub fn policies(&self) -> usize {
        self.policies
    }

    /// Largest rank.
    pub fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// Whether no policy has a gain or a bias anywhere.
    pub fn is_low_rank(&self) -> bool {
        self.low_rank
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        4 * self.values.len() as u64 + 8 * self.entries.len() as u64
    }

    /// Puts `updates`, `[policies given][sites][parts]`, in place of what was there, for the work given to `stream`
    /// afterwards. After an error everything is as before.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for too many policies, too large a rank, or lengths that do not fit;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn replace(&mut self, stream: &Stream, updates: &[Vec<Vec<PartUpdate>>]) -> Result<()> {
        if updates.len() > self.policies {
            let problem = format!("are {}, there is room for {}", updates.len(), self.policies);
            return refuse("policies", problem);
        }
        let words = self.check(updates)?;
        let values = DeviceBuffer::<u32>::zeroed(stream.device(), words.max(1))?;
        let mut entries = vec![0u64; self.entries.len()];
        let mut at = 0;
        let mut first = 0;
        for (s, site) in self.sites.iter().enumerate() {
            for (p, policy) in updates.iter().enumerate() {
                for (i, part) in policy[s].iter().enumerate() {
                    let entry =
                        &mut entries[(first + p * site.parts.len() + i) * ENTRY_WORDS..][..ENTRY_WORDS];
                    let halves: [&[bf16]; 2] = [&part.a, &part.b];
                    for (word, half) in entry.iter_mut().zip(halves) {
                        *word = put(stream, &values, &mut at, &pairs(half))?;
                    }
                    let floats: [&[f32]; 2] = [&part.gain, &part.bias];
                    for (word, values_of) in entry[2..].iter_mut().zip(floats) {
                        let bits: Vec<u32> = values_of.iter().map(|x| x.to_bits()).collect();
                        *word = put(stream, &values, &mut at, &bits)?;
                    }
                    // The lower half of a little-endian pair of u32.
                    entry[4] = part.rank as u64;
                }
            }
            first += self.policies * site.parts.len();
        }
        // All values are there, and nothing that reads the old ones is under way, before the entries change.
        stream.synchronize()?;
        stream.upload(&self.entries, &entries)?;
        stream.synchronize()?;
        self.values = values;
        let mut parts = updates.iter().flatten().flatten();
        self.low_rank = parts.all(|part| part.gain.is_empty() && part.bias.is_empty());
        Ok(())
    }

    /// Checks lengths; words that the values take.
    fn check(&self, updates: &[Vec<Vec<PartUpdate>>]) -> Result<usize> {
        let mut words = 0;
        for policy in updates {
            same("sites", policy.len(), self.sites.len())?;
            for (site, parts) in self.sites.iter().zip(policy) {
                same("parts", parts.len(), site.parts.len())?;
                for (part, &rows) in parts.iter().zip(&site.parts) {
                    if part.rank > self.max_rank || !part.rank.is_multiple_of(RANK_QUANTUM) {
                        return refuse(
                            "rank",
                            format!("is {}, at most {} are possible", part.rank, self.max_rank),
                        );
                    }
                    same("A", part.a.len(), part.rank * site.k)?;
                    same("B", part.b.len(), part.rank * rows)?;
                    for (what, values) in [("gain", &part.gain), ("bias", &part.bias)] {
                        if !values.is_empty() {
                            same(what, values.len(), rows)?;
                        }
                    }
                    let padded = |len: usize| len.next_multiple_of(4);
                    words += padded(part.a.len() / 2) + padded(part.b.len() / 2);
                    words += padded(part.gain.len()) + padded(part.bias.len());
                }
            }
        }
        Ok(words)
    }
}

/// Copies words to the next aligned place and gives its address; 0 for none.
fn put(stream: &Stream, values: &DeviceBuffer<u32>, at: &mut usize, words: &[u32]) -> Result<u64> {
    if words.is_empty() {
        return Ok(0);
    }
    let place = values.slice(*at..*at + words.len())?;
    stream.upload(place, words)?;
    *at += words.len().next_multiple_of(4);
    Ok(place.ptr())
}

fn pairs(values: &[bf16]) -> Vec<u32> {
    let word = |pair: &[bf16]| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
    values.chunks_exact(2).map(word).collect()
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct UnmergedParams {
    entries: u64,
    slots: u64,
    policy_of_slot: u64,
    policies: u32,
    parts: u32,
    n_slots: u32,
    pub(super) m: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DownParams {
    unmerged: UnmergedParams,
    x: u64,
    h: u64,
    k: u32,
    max_rank: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct UpParams {
    unmerged: UnmergedParams,
    h: u64,
    y: u64,
    n: u32,
    max_rank: u32,
    y_is_f32: u32,
    unused: u32,
    ends: [u32; 4],
}

/// What the second product of adapters needs: the result of the first, and the tables.
#[derive(Debug, Clone, Copy)]
pub struct LowRankTerm<'a> {
    pub(super) unmerged: UnmergedParams,
    rows: RowPolicies<'a>,
    pub(super) h: DeviceSlice<'a, f32>,
    pub(super) ends: [u32; 4],
    pub(super) n: usize,
    pub(super) max_rank: u32,
    pub(super) low_rank: bool,
}

impl LowRankTerm<'_> {
    pub(super) fn keep(&self, stream: &Stream) {
        stream.keep_memory(self.h);
        stream.keep_memory(self.rows.slots);
        stream.keep_memory(self.rows.policy_of_slot);
    }
}

/// The kernels for adapters at run time, loaded on one device.
#[derive(Debug, Clone)]
pub struct UnmergedKernels {
    down: Kernel,
    up: Kernel,
}

impl UnmergedKernels {
    /// Compiles the kernels, or takes them from the compiler's cache, and loads them.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn load(compiler: &Compiler, device: &Device) -> Result<Self> {
        let modules = compiler.load_all(device, &specs())?;
        Ok(Self {
            down: modules[0].kernel("unmerged_down")?,
            up: modules[1].kernel("unmerged_up")?,
        })
    }

    /// Adds to `y` `[m, n]`, the base product of `x` `[m, k]`, what the policy of each row adds at the site. `h` is room for
    /// `m * parts * max_rank` numbers.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for a site that is not there or lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn apply(
        &self,
        stream: &Stream,
        tables: &UnmergedTables,
        site: usize,
        rows: RowPolicies<'_>,
        x: DeviceSlice<'_, bf16>,
        h: DeviceSlice<'_, f32>,
        y: ProductOutput<'_>,
    ) -> Result<()> {
        let term = self.down(stream, tables, site, rows, x, h)?;
        self.up(stream, &term, y)
    }

    /// The first of the two products: into `h`, from `x`, both as for [`apply`](Self::apply).
    ///
    /// # Errors
    /// As for [`apply`](Self::apply). Panics: none.
    pub fn down<'a>(
        &self,
        stream: &Stream,
        tables: &UnmergedTables,
        site: usize,
        rows: RowPolicies<'a>,
        x: DeviceSlice<'_, bf16>,
        h: DeviceSlice<'a, f32>,
    ) -> Result<LowRankTerm<'a>> {
        let m = rows.slots.len();
        let Some(shape) = tables.sites.get(site) else {
            return refuse("site", format!("{site} of {}", tables.sites.len()));
        };
        let parts = shape.parts.len();
        same("x", x.len(), m * shape.k)?;
        aligned("x", x.ptr(), 16)?;
        aligned("h", h.ptr(), 16)?;
        if h.len() < m * parts * tables.max_rank {
            let problem = format!(
                "has room for {} numbers of {}",
                h.len(),
                m * parts * tables.max_rank
            );
            return refuse("h", problem);
        }
        let before: usize = tables.sites[..site]
            .iter()
            .map(|s| tables.policies * s.parts.len())
            .sum();
        let entries = tables.policies * parts * ENTRY_WORDS;
        let entries = tables
            .entries
            .slice(before * ENTRY_WORDS..before * ENTRY_WORDS + entries)?;
        stream.keep_memory(&tables.entries);
        stream.keep_memory(x);
        let mut ends = [0; 4];
        let mut end = 0;
        for (to, rows) in ends.iter_mut().zip(&shape.parts) {
            end += rows;
            *to = small("rows", end)?;
        }
        let term = LowRankTerm {
            unmerged: UnmergedParams {
                entries: entries.ptr(),
                slots: rows.slots.ptr(),
                policy_of_slot: rows.policy_of_slot.ptr(),
                policies: small("policies", tables.policies)?,
                parts: parts as u32,
                n_slots: small("slots", rows.policy_of_slot.len())?,
                m: small("rows", m)?,
            },
            rows,
            h,
            ends,
            n: shape.n(),
            max_rank: small("max_rank", tables.max_rank)?,
            low_rank: tables.low_rank,
        };
        term.keep(stream);
        if m == 0 {
            return Ok(term);
        }
        let down = DownParams {
            unmerged: term.unmerged,
            x: x.ptr(),
            h: h.ptr(),
            k: small("k", shape.k)?,
            max_rank: term.max_rank,
        };
        let grid = [parts as u32 * term.max_rank / 16, blocks_of(m, DOWN_ROWS)?, 1];
        let config = LaunchConfig::with_dimensions(grid, [DOWN_WARPS * 32, 1, 1]).programmatic(true);
        // SAFETY: every buffer has the length that the kernel's header gives it, checked above; what the entries point to
        // was checked in `replace` and lives as long as they do; slots and policies are checked by the kernel.
        unsafe { self.down.launch(stream, &config, &down) }?;
        Ok(term)
    }

    /// The second of the two products, added to `y`.
    ///
    /// # Errors
    /// As for [`apply`](Self::apply). Panics: none.
    pub fn up(&self, stream: &Stream, term: &LowRankTerm<'_>, y: ProductOutput<'_>) -> Result<()> {
        let m = term.unmerged.m as usize;
        same("y", y.len(), m * term.n)?;
        y.keep(stream);
        if m == 0 {
            return Ok(());
        }
        let up = UpParams {
            unmerged: term.unmerged,
            h: term.h.ptr(),
            y: y.ptr(),
            n: small("n", term.n)?,
            max_rank: term.max_rank,
            y_is_f32: y.is_f32(),
            unused: 0,
            ends: term.ends,
        };
        let grid = [
            small("n", term.n.div_ceil(16 * UP_WARPS))?,
            blocks_of(m, UP_ROWS)?,
            1,
        ];
        let config = LaunchConfig::with_dimensions(grid, [UP_WARPS as u32 * 32, 1, 1]).programmatic(true);
        // SAFETY: as for `down`.
        Ok(unsafe { self.up.launch(stream, &config, &up) }?)
    }
}

fn blocks_of(m: usize, rows: usize) -> Result<u32> {
    let blocks = m.div_ceil(rows);
    match blocks > 65_535 {
        true => refuse(
            "rows",
            format!("{m} rows at once, at most {} are possible", 65_535 * rows),
        ),
        false => small("rows", blocks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lora_merge::{Error, LowRankTerm, ModuleUpdate};

    /// `[3, 2]` of rank 1.
    fn part(a: [f32; 2], b: [f32; 3], scaling: f64) -> Result<PartUpdate, Error> {
        let term = LowRankTerm {
            r: 1,
            left: b.into(),
            right: a.into(),
            scaling,
            magnitude: None,
        };
        let update = ModuleUpdate::from_terms(3, 2, vec![term])?;
        PartUpdate::rounded(update.unmerged(None)?, None)
    }

    /// bf16's greatest number, and the least f32 that rounds to its infinity.
    const GREATEST: f32 = f32::from_bits(0x7f7f_0000);
    const TOO_LARGE: f32 = f32::from_bits(0x7f7f_8000);

    #[test]
    fn factors_that_bf16_cannot_hold_are_refused_by_name() {
        let below = TOO_LARGE.next_down();
        let fits = part([1.0, -below], [-GREATEST, below, 0.5], 1.0).unwrap();
        assert!(fits.a.iter().chain(&fits.b).all(|v| v.is_finite()));
        for (a, b, scaling, expected) in [
            ([1.0, TOO_LARGE], [1.0; 3], 1.0, ("lora_A", 0, 1)),
            ([-f32::MAX, 1.0], [f32::MAX; 3], 1.0, ("lora_A", 0, 0)),
            ([1.0; 2], [1.0, 2.0, -f32::MAX], 1.0, ("lora_B", 2, 0)),
            ([1.0; 2], [1.0, TOO_LARGE / 4.0, 1.0], 4.0, ("lora_B", 1, 0)),
        ] {
            let error = part(a, b, scaling).unwrap_err().in_module("layers.1.up_proj");
            let text = error.to_string();
            let Error::FactorNotFinite {
                module,
                factor,
                row,
                column,
                format,
            } = error
            else {
                panic!("{text}");
            };
            assert_eq!((module.as_str(), format), ("layers.1.up_proj", "bf16"));
            assert_eq!((factor, row, column), expected);
            assert!(
                text.contains("`layers.1.up_proj`") && text.contains(factor),
                "{text}"
            );
        }
    }

    #[test]
    fn ranks_are_filled_up_with_zeros() {
        let part = part([1.0, 2.0], [3.0, 4.0, 5.0], 2.0).unwrap();
        assert_eq!(part.rank, RANK_QUANTUM);
        let at = |at: usize, n: usize, value: f32| {
            let mut row = vec![bf16::ZERO; n];
            row[at] = bf16::from_f32(value);
            row
        };
        let first = [bf16::ONE, bf16::from_f32(2.0)];
        assert_eq!((&part.a[..2], part.a.len()), (&first[..], 2 * RANK_QUANTUM));
        assert!(part.a[2..].iter().all(|v| *v == bf16::ZERO));
        let b = [6.0, 8.0, 10.0].map(|value| at(0, RANK_QUANTUM, value)).concat();
        assert_eq!(part.b, b);
        let none = ModuleUpdate::from_terms(3, 2, vec![])
            .unwrap()
            .unmerged(None)
            .unwrap();
        let bias = Some(vec![1.0; 3]);
        let none = PartUpdate::rounded(none, bias.clone()).unwrap();
        assert_eq!((none.rank, none.a.len(), none.b.len()), (0, 0, 0));
        assert_eq!(Some(none.bias), bias);
    }
}
