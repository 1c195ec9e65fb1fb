//! Counters in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::app::App;
use super::error::ApiError;

/// Upper bounds of the buckets, in seconds.
const BOUNDS: [f64; 12] = [
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0,
];

/// Durations by size.
#[derive(Debug, Default)]
struct Histogram {
    /// One more than bounds, for what is above all of them.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

impl Histogram {
    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS
            .iter()
            .position(|&bound| seconds <= bound)
            .unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        header(name, help, "histogram", out);
        let mut sum = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            sum += count.load(Ordering::Relaxed);
            match BOUNDS.get(bucket) {
                Some(bound) => push(out, format_args!("{name}_bucket{{le=\"{bound}\"}} {sum}\n")),
                None => push(out, format_args!("{name}_bucket{{le=\"+Inf\"}} {sum}\n")),
            }
        }
        let seconds = self.micros.load(Ordering::Relaxed) as f64 / 1e6;
        push(out, format_args!("{name}_sum {seconds}\n{name}_count {sum}\n"));
    }
}

/// What the HTTP side counts; the engine's own counters come from its snapshot.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    /// By route and status.
    answers: Mutex<BTreeMap<(String, u16), u64>>,
    rejected: AtomicU64,
    connections: AtomicU64,
    open_connections: AtomicU64,
    request_time: Histogram,
}

impl Metrics {
    pub(super) fn answered(&self, route: &str, status: u16) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        *answers.entry((route.to_string(), status)).or_default() += 1;
    }

    /// A job was not taken.
    pub(super) fn rejected(&self, error: &ApiError) {
        if error.status.as_u16() == 429 {
            self.rejected.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A job gave all its completions after this time.
    pub(super) fn finished(&self, time: Duration) {
        self.request_time.observe(time);
    }

    pub(super) fn opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.open_connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn closed(&self) {
        self.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All metrics of a server.
pub(super) fn render(app: &App) -> String {
    let mut out = String::new();
    let snapshot = app.shared.snapshot();
    let statistics = &snapshot.statistics;
    let unfinished = app.engine.unfinished();
    let gauges = [
        (
            "rollout_sequences_running",
            "Sequences in the batch.",
            snapshot.running as f64,
        ),
        (
            "rollout_sequences_waiting",
            "Completions accepted that are not in the batch.",
            unfinished.saturating_sub(snapshot.running) as f64,
        ),
        (
            "rollout_kv_pages",
            "Pages of the KV cache.",
            snapshot.pages as f64,
        ),
        (
            "rollout_kv_pages_free",
            "Pages that neither a sequence nor the prefix cache holds.",
            snapshot.free_pages as f64,
        ),
        (
            "rollout_paused",
            "1 while generation is paused.",
            f64::from(u8::from(snapshot.paused)),
        ),
        (
            "rollout_healthy",
            "1 while there is an engine that gets on.",
            f64::from(u8::from(snapshot.healthy)),
        ),
        (
            "rollout_policy_version",
            "Version of the policy in force.",
            snapshot.policy_version as f64,
        ),
        (
            "rollout_adapters",
            "Adapters that requests can name.",
            app.policies.adapters().len() as f64,
        ),
        (
            "rollout_http_connections",
            "Connections open.",
            app.metrics.open_connections.load(Ordering::Relaxed) as f64,
        ),
    ];
    for (name, help, value) in gauges {
        header(name, help, "gauge", &mut out);
        push(&mut out, format_args!("{name} {value}\n"));
    }
    let counters = [
        (
            "rollout_steps_total",
            "Passes through the model.",
            statistics.steps as f64,
        ),
        (
            "rollout_prefill_tokens_total",
            "Tokens computed by prefill.",
            statistics.prefill_tokens as f64,
        ),
        (
            "rollout_generated_tokens_total",
            "Tokens of completions.",
            statistics.new_tokens as f64,
        ),
        (
            "rollout_completions_total",
            "Completions finished.",
            statistics.finished_completions as f64,
        ),
        (
            "rollout_preemptions_total",
            "Times that a sequence gave its pages back for an older one.",
            statistics.preemptions as f64,
        ),
        (
            "rollout_policy_switches_total",
            "Times that another policy came into force.",
            app.shared.switches() as f64,
        ),
        (
            "rollout_busy_seconds_total",
            "Time spent in steps.",
            app.shared.busy().as_secs_f64(),
        ),
        (
            "rollout_rejected_total",
            "Requests answered with 429.",
            app.metrics.rejected.load(Ordering::Relaxed) as f64,
        ),
        (
            "rollout_http_connections_total",
            "Connections accepted.",
            app.metrics.connections.load(Ordering::Relaxed) as f64,
        ),
    ];
    for (name, help, value) in counters {
        header(name, help, "counter", &mut out);
        push(&mut out, format_args!("{name} {value}\n"));
    }
    let name = "rollout_http_answers_total";
    header(name, "Answers by route and status.", "counter", &mut out);
    let answers = app.metrics.answers.lock().unwrap_or_else(PoisonError::into_inner);
    for ((route, status), count) in answers.iter() {
        push(
            &mut out,
            format_args!("{name}{{route=\"{route}\",status=\"{status}\"}} {count}\n"),
        );
    }
    drop(answers);
    let help = "Time from a request's acceptance to its last completion, unless streamed.";
    app.metrics
        .request_time
        .write("rollout_request_seconds", help, &mut out);
    out
}

fn header(name: &str, help: &str, kind: &str, out: &mut String) {
    push(out, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
}

/// Writing to a `String` does not fail.
fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let histogram = Histogram::default();
        for seconds in [0.005, 0.5, 0.6, 5000.0] {
            histogram.observe(Duration::from_secs_f64(seconds));
        }
        let mut out = String::new();
        histogram.write("x", "help", &mut out);
        for line in [
            "x_bucket{le=\"0.01\"} 1",
            "x_bucket{le=\"0.3\"} 1",
            "x_bucket{le=\"1\"} 3",
            "x_bucket{le=\"3000\"} 3",
            "x_bucket{le=\"+Inf\"} 4",
            "x_count 4",
        ] {
            assert!(out.lines().any(|l| l == line), "{line} is not in\n{out}");
        }
    }
}
