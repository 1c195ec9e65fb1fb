//! Which batch sizes get a graph, and which graph serves a batch.

use crate::error::{Error, Result};

/// Step of the buckets above 8.
const STEP: usize = 16;
/// Most rows of a set that is listed step by step: beyond this it is a mistake, and the list alone would fill the memory.
const MOST_ROWS: usize = 1 << 24;

/// The batch sizes for which graphs are captured: 1, 2, 4, 8, then every multiple of 16, up to and including a
/// maximum that is always a member itself, even if it is 7 or 12 or 100.
///
/// Invariant: members are strictly ascending, none is 0, the last is the maximum. [`BucketSet::from_sizes`] makes sets of
/// other members.
///
/// ```
/// use cuda_graphs::BucketSet;
///
/// let buckets = BucketSet::new(40)?;
/// assert_eq!(buckets.sizes(), [1, 2, 4, 8, 16, 32, 40]);
/// assert_eq!(buckets.for_batch(5), Some(8));
/// assert_eq!(buckets.for_batch(33), Some(40));
/// assert_eq!(buckets.for_batch(41), None);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct BucketSet {
    sizes: Vec<usize>,
}

impl BucketSet {
    /// The buckets up to `max` rows.
    ///
    /// # Errors
    /// [`Error::EmptyBucketSet`] if `max` is 0, [`Error::BatchTooLarge`] beyond 2²⁴.
    pub fn new(max: usize) -> Result<Self> {
        if max == 0 {
            return Err(Error::EmptyBucketSet);
        }
        if max > MOST_ROWS {
            return Err(Error::BatchTooLarge {
                rows: max,
                max: MOST_ROWS,
            });
        }
        let mut sizes: Vec<usize> = [1, 2, 4, 8].into_iter().filter(|&size| size < max).collect();
        sizes.extend((STEP..max).step_by(STEP));
        sizes.push(max);
        Ok(Self { sizes })
    }

    /// A set of the user's own sizes, in any order; repeats are dropped. Every batch up to the largest is served.
    ///
    /// # Errors
    /// [`Error::EmptyBucketSet`] if there is no size, or one of them is 0.
    pub fn from_sizes(sizes: &[usize]) -> Result<Self> {
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        match sizes.first() {
            None | Some(0) => Err(Error::EmptyBucketSet),
            Some(_) => Ok(Self { sizes }),
        }
    }

    /// The smallest bucket of at least `rows` rows; `None` for 0 rows (there is nothing to run) and for more rows
    /// than the maximum. `O(log n)`.
    pub fn for_batch(&self, rows: usize) -> Option<usize> {
        if rows == 0 {
            return None;
        }
        self.sizes
            .get(self.sizes.partition_point(|&size| size < rows))
            .copied()
    }

    /// All sizes, ascending.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// All sizes, descending: the order of capture, so that the memory of the largest serves every smaller one.
    pub fn largest_first(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.sizes.iter().rev().copied()
    }

    /// The largest size.
    pub fn max(&self) -> usize {
        // Both constructors leave at least one member.
        self.sizes.last().copied().unwrap_or(0)
    }

    /// How many rows of the bucket that serves `rows` are padding; `None` as in [`BucketSet::for_batch`].
    pub fn padding(&self, rows: usize) -> Option<usize> {
        self.for_batch(rows).map(|size| size - rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule of the documentation, read literally.
    fn oracle(max: usize) -> Vec<usize> {
        (1..=max)
            .filter(|&n| matches!(n, 1 | 2 | 4 | 8) || n % 16 == 0 || n == max)
            .collect()
    }

    #[test]
    fn every_maximum_to_300_has_the_documented_buckets_and_serves_every_batch() {
        for max in 1..=300 {
            let buckets = BucketSet::new(max).unwrap();
            assert_eq!(buckets.sizes(), oracle(max), "maximum {max}");
            assert_eq!(buckets.max(), max);
            for rows in 1..=max {
                let expected = oracle(max).into_iter().find(|&size| size >= rows);
                assert!(expected.is_some());
                assert_eq!(buckets.for_batch(rows), expected, "{rows} rows, maximum {max}");
                assert_eq!(buckets.padding(rows), expected.map(|size| size - rows));
            }
            assert_eq!(buckets.for_batch(0), None);
            assert_eq!(buckets.for_batch(max + 1), None);
        }
    }

    #[test]
    fn maxima_between_the_multiples_of_16_have_their_own_bucket() {
        for max in [6, 7, 10, 12, 15, 18, 100, 200, 300] {
            assert_eq!(BucketSet::new(max).unwrap().for_batch(max), Some(max));
        }
    }

    #[test]
    fn capture_order_is_descending() {
        let buckets = BucketSet::new(33).unwrap();
        assert_eq!(
            buckets.largest_first().collect::<Vec<_>>(),
            [33, 32, 16, 8, 4, 2, 1]
        );
    }

    #[test]
    fn a_maximum_of_zero_is_refused() {
        assert_eq!(BucketSet::new(0), Err(Error::EmptyBucketSet));
        assert_eq!(BucketSet::from_sizes(&[]), Err(Error::EmptyBucketSet));
        assert_eq!(BucketSet::from_sizes(&[4, 0]), Err(Error::EmptyBucketSet));
    }

    #[test]
    fn a_maximum_whose_list_would_fill_the_memory_is_refused() {
        for rows in [MOST_ROWS + 1, usize::MAX] {
            let refused = Error::BatchTooLarge { rows, max: MOST_ROWS };
            assert_eq!(BucketSet::new(rows), Err(refused));
        }
        assert_eq!(
            BucketSet::new(MOST_ROWS).map(|buckets| buckets.max()),
            Ok(MOST_ROWS)
        );
    }

    #[test]
    fn the_largest_possible_batch_does_not_overflow() {
        assert_eq!(
            BucketSet::from_sizes(&[1, usize::MAX]).unwrap().for_batch(2),
            Some(usize::MAX)
        );
    }

    proptest! {
        #[test]
        fn own_sizes_serve_every_batch_by_the_smallest_that_fits(
            sizes in proptest::collection::vec(1usize..500, 1..20),
            rows in 0usize..600,
        ) {
            let buckets = BucketSet::from_sizes(&sizes).unwrap();
            let expected = sizes.iter().copied().filter(|&size| rows > 0 && size >= rows).min();
            prop_assert_eq!(buckets.for_batch(rows), expected);
        }
    }
}
