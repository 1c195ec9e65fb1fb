//! Progress bars, on a terminal only.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::telemetry::BARS;

/// Counts completions on standard error, or nothing where that is not a terminal or the user wants quiet.
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub(super) fn new(quiet: bool, completions: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(completions as u64), ProgressDrawTarget::hidden());
        if quiet || !is_shown() {
            return Self { bar };
        }
        let bar = BARS.add(ProgressBar::new(completions as u64));
        bar.set_style(style("{wide_bar} {pos}/{len} completions {msg} {elapsed}"));
        Self { bar }
    }

    pub(super) fn update(&self, completions: usize, tokens: u64, seconds: f64) {
        if !self.bar.is_hidden() {
            self.bar.set_position(completions as u64);
            self.bar.set_message(format!(
                "{tokens} tokens, {:.0} tok/s",
                tokens as f64 / seconds.max(1e-9)
            ));
        }
    }

    /// Runs `print` with the bar out of the way.
    pub(super) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Shows how far a sweep is, of its time limit if it has one.
#[cfg(feature = "cuda")]
pub(super) struct Steps {
    bar: ProgressBar,
}

#[cfg(feature = "cuda")]
impl Steps {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        let bar = match limit {
            Some(limit) => {
                ProgressBar::with_draw_target(Some(limit.as_secs().max(1)), ProgressDrawTarget::hidden())
            }
            None => ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
        };
        if !is_shown() {
            return Self { bar };
        }
        let bar = BARS.add(bar);
        bar.set_style(match limit {
            Some(_) => style("{wide_bar} {elapsed} of {len} s {msg}"),
            None => style("{spinner} {elapsed} {msg}"),
        });
        Self { bar }
    }

    pub(super) fn update(&self, elapsed: Duration, message: &str) {
        self.bar
            .set_position(elapsed.as_secs().min(self.bar.length().unwrap_or(u64::MAX)));
        self.bar.set_message(message.to_string());
    }

    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Whether anybody watches standard error.
pub(super) fn is_shown() -> bool {
    std::io::stderr().is_terminal()
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Shows, while a span of [`LoadingLayer::SPANS`] is open, the one that began last: what is loaded, compiled or captured,
/// and how much of it is done if the span has the fields `index` and `of`.
#[derive(Default)]
pub(super) struct LoadingLayer {
    state: Mutex<Loading>,
}

#[derive(Default)]
struct Loading {
    open: usize,
    bar: Option<ProgressBar>,
}

impl LoadingLayer {
    /// Names of the spans that take long enough to watch.
    pub(super) const SPANS: [&str; 6] = ["load", "read", "upload", "compile", "capture", "refresh"];
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for LoadingLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut label = Label::default();
        attributes.record(&mut label);
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.open += 1;
        let bar = state.bar.get_or_insert_with(|| {
            let bar = BARS.add(ProgressBar::no_length());
            bar.set_style(style("{spinner} {msg} {elapsed}"));
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        bar.set_message(label.text(attributes.metadata().name()));
    }

    fn on_close(&self, _: Id, _: Context<'_, S>) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.open = state.open.saturating_sub(1);
        if state.open == 0
            && let Some(bar) = state.bar.take()
        {
            bar.finish_and_clear();
            BARS.remove(&bar);
        }
    }
}

/// What a span is about, in words.
#[derive(Default)]
struct Label {
    about: String,
    index: Option<u64>,
    of: Option<u64>,
}

impl Label {
    fn text(&self, span: &str) -> String {
        let mut text = match span {
            "load" => "loading",
            "read" => "reading",
            "upload" => "copying to the GPU:",
            "compile" => "compiling",
            "capture" => "capturing a graph for",
            "refresh" => "merging adapters",
            other => other,
        }
        .to_string();
        if !self.about.is_empty() {
            let _ = write!(text, " {}", self.about);
        }
        if let (Some(index), Some(of)) = (self.index, self.of) {
            let _ = write!(text, " ({} of {of})", index + 1);
        }
        text
    }
}

impl Visit for Label {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if matches!(field.name(), "what" | "kernel") {
            self.about = format!("{value:?}");
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "index" => self.index = Some(value),
            "of" => self.of = Some(value),
            "bucket" => self.about = format!("batches up to {value}"),
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if matches!(field.name(), "what" | "kernel") {
            self.about = value.to_string();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_say_what_and_how_much() {
        let label = Label {
            about: "model.layers".into(),
            index: Some(2),
            of: Some(36),
        };
        assert_eq!(label.text("upload"), "copying to the GPU: model.layers (3 of 36)");
        assert_eq!(Label::default().text("load"), "loading");
    }
}
