//! Philox4x32-10: random numbers that are a function of a key and a counter.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// The block of random numbers of a counter under a key, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3".
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let products = [
            u64::from(MULTIPLIERS[0]) * u64::from(counter[0]),
            u64::from(MULTIPLIERS[1]) * u64::from(counter[2]),
        ];
        counter = [
            (products[1] >> 32) as u32 ^ counter[1] ^ key[0],
            products[1] as u32,
            (products[0] >> 32) as u32 ^ counter[3] ^ key[1],
            products[0] as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The random numbers of one completion: the key is the request's seed, the counter
/// `[token number, completion index, 0, 0]`.
///
/// ```
/// use qwen3_model::sampling::Philox;
///
/// let numbers = Philox { seed: 1, completion: 0 };
/// assert_eq!(numbers.uniform(7), numbers.uniform(7), "a function of seed, completion and place");
/// assert_ne!(numbers.uniform(7), Philox { seed: 1, completion: 1 }.uniform(7));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    /// Key.
    pub seed: u64,
    /// Index of the completion among those of its prompt.
    pub completion: u32,
}

impl Philox {
    /// A uniform 64-bit number for token number `index` of the completion.
    pub fn uniform(self, index: u32) -> u64 {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let block = philox4x32_10([index, self.completion, 0, 0], key);
        u64::from(block[0]) | u64::from(block[1]) << 32
    }

    /// The seed of request number `request` of an engine with this seed, for requests that bring none. For a given engine
    /// seed no two requests have the same.
    pub fn seed_of_request(engine_seed: u64, request: u64) -> u64 {
        // SplitMix64: a bijection of the state.
        let mut x = engine_seed.wrapping_add(request.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of Random123 (kat_vectors, `philox4x32 10`).
    #[test]
    fn blocks_are_those_of_random123() {
        for (counter, key, block) in [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32_10(counter, key), block);
        }
    }

    #[test]
    fn streams_are_distinct() {
        let mut seen = std::collections::HashSet::new();
        for seed in 0..20 {
            for completion in 0..20 {
                for index in 0..50 {
                    assert!(seen.insert(Philox { seed, completion }.uniform(index)));
                }
            }
        }
        let seeds: std::collections::HashSet<_> =
            (0..10_000).map(|n| Philox::seed_of_request(7, n)).collect();
        assert_eq!(seeds.len(), 10_000);
        assert_ne!(Philox::seed_of_request(7, 0), Philox::seed_of_request(8, 0));
    }
}
