//! What capturing cost and how replays were served: plain numbers, available without CUDA.

use serde::{Deserialize, Serialize};

/// The cost of one bucket's graph.
///
/// ```
/// use cuda_graphs::BucketReport;
///
/// let report = BucketReport {
///     bucket: 8,
///     nodes: 200,
///     warm_up_ms: 2.0,
///     capture_ms: 3.0,
///     instantiate_ms: 1.0,
///     memory_bytes: 1 << 20,
/// };
/// assert_eq!(report.warm_up_ms + report.capture_ms + report.instantiate_ms, 6.0);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BucketReport {
    /// Rows of the bucket.
    pub bucket: usize,
    /// Nodes of the graph.
    pub nodes: usize,
    /// Milliseconds of the eager run before the capture.
    pub warm_up_ms: f64,
    /// Milliseconds from the begin of the capture to the captured graph.
    pub capture_ms: f64,
    /// Milliseconds to make the graph executable and to upload it.
    pub instantiate_ms: f64,
    /// Device memory that disappeared while this bucket was captured, bytes.
    pub memory_bytes: u64,
}

/// The cost of all graphs of a cache, in the order of capture (largest first).
///
/// ```
/// use cuda_graphs::CaptureReport;
///
/// let report = CaptureReport { buckets: Vec::new(), total_ms: 12.5, memory_bytes: 0 };
/// assert!(!report.to_string().is_empty(), "prints one line per bucket");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaptureReport {
    /// One entry per bucket.
    pub buckets: Vec<BucketReport>,
    /// Milliseconds from start to end.
    pub total_ms: f64,
    /// Device memory taken in all, bytes.
    pub memory_bytes: u64,
}

impl std::fmt::Display for CaptureReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "bucket  nodes  warm-up ms  capture ms  instantiate ms  memory MiB"
        )?;
        for b in &self.buckets {
            writeln!(
                f,
                "{:>6}  {:>5}  {:>10.2}  {:>10.2}  {:>14.2}  {:>10.1}",
                b.bucket,
                b.nodes,
                b.warm_up_ms,
                b.capture_ms,
                b.instantiate_ms,
                b.memory_bytes as f64 / (1 << 20) as f64
            )?;
        }
        write!(
            f,
            "{} graphs in {:.0} ms, {:.1} MiB of device memory",
            self.buckets.len(),
            self.total_ms,
            self.memory_bytes as f64 / (1 << 20) as f64
        )
    }
}

/// How many replays each bucket served, and how many of their rows were padding.
///
/// ```
/// use cuda_graphs::ReplayStats;
///
/// let mut stats = ReplayStats::default();
/// stats.record(5, 8); // five rows in the bucket of eight
/// assert_eq!((stats.replays, stats.rows, stats.padded_rows), (1, 5, 3));
/// assert_eq!(stats.padding_share(), 0.375);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayStats {
    /// Replays in all.
    pub replays: u64,
    /// Rows that carried work.
    pub rows: u64,
    /// Rows that were padding.
    pub padded_rows: u64,
    /// Replays by bucket size.
    pub by_bucket: std::collections::BTreeMap<usize, u64>,
}

impl ReplayStats {
    /// Counts one replay of `rows` rows in `bucket`. Rows beyond the bucket count as no padding.
    pub fn record(&mut self, rows: usize, bucket: usize) {
        self.replays += 1;
        self.rows += rows as u64;
        self.padded_rows += bucket.saturating_sub(rows) as u64;
        *self.by_bucket.entry(bucket).or_insert(0) += 1;
    }

    /// Padding as a share of all rows that were run; 0 before the first replay.
    pub fn padding_share(&self) -> f64 {
        let all = self.rows + self.padded_rows;
        if all == 0 {
            0.0
        } else {
            self.padded_rows as f64 / all as f64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_are_counted_by_bucket_with_their_padding() {
        let mut stats = ReplayStats::default();
        assert_eq!(stats.padding_share(), 0.0);
        stats.record(5, 8);
        stats.record(8, 8);
        stats.record(1, 1);
        assert_eq!(stats.replays, 3);
        assert_eq!(stats.by_bucket.into_iter().collect::<Vec<_>>(), [(1, 1), (8, 2)]);
        assert_eq!((stats.rows, stats.padded_rows), (14, 3));
    }

    #[test]
    fn the_report_survives_json_and_prints_one_line_per_bucket() {
        let bucket = BucketReport {
            bucket: 64,
            nodes: 12,
            warm_up_ms: 1.5,
            capture_ms: 2.5,
            instantiate_ms: 0.5,
            memory_bytes: 1 << 20,
        };
        let report = CaptureReport {
            buckets: vec![bucket],
            total_ms: 4.5,
            memory_bytes: 1 << 20,
        };
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<CaptureReport>(&json).unwrap(), report);
        assert_eq!(report.to_string().lines().count(), 3);
    }
}
