//! The progress bar, on a terminal only.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on standard error, or nothing where that is not a terminal or the user wants quiet.
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub(super) fn new(quiet: bool) -> Self {
        let shown = !quiet && std::io::stderr().is_terminal();
        let target = if shown {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self {
            bar: ProgressBar::with_draw_target(None, target),
        }
    }

    /// Shows that something without a known length goes on.
    pub(super) fn spinner(&self, message: &str) {
        self.bar.set_style(style("{spinner} {msg} {elapsed}"));
        self.bar.set_message(message.to_string());
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(Duration::from_millis(100));
        }
    }

    /// Starts to count completions.
    pub(super) fn start(&self, completions: usize) {
        self.bar.disable_steady_tick();
        self.bar.reset();
        self.bar.set_length(completions as u64);
        self.bar
            .set_style(style("{wide_bar} {pos}/{len} completions {msg} {elapsed}"));
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

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
