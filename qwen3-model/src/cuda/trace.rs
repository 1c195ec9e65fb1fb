//! When decode steps start and end on the device, and how long it waits between them.
//!
//! Two events around each step: they tell the time at which the device gets there, so that a host that is late shows as
//! time between the end of a step and the start of the next. What a host queues between two steps (read-backs, rows of the
//! page table, sampling parameters) is in that time as well.

use cuda_graphs::{Device, Event, Stream};

use super::CudaBackend;
use crate::{Error, Result};

/// Events that a trace takes at most.
const MAX_STEPS: usize = 1 << 16;

/// A decode step on the device, in milliseconds.
///
/// ```
/// use qwen3_model::cuda::DecodeSpan;
///
/// let span = DecodeSpan { busy_ms: 2.5, gap_ms: 0.01 };
/// assert!(span.gap_ms < 0.03 * span.busy_ms, "the device hardly waits for the host");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeSpan {
    /// From the start of the step's graph (or first kernel) to its end.
    pub busy_ms: f64,
    /// From the end of the traced step before to the start of this one; 0 for the first.
    pub gap_ms: f64,
}

/// Events for a number of steps.
#[derive(Debug)]
pub(super) struct DecodeTrace {
    events: Vec<[Event; 2]>,
    used: usize,
}

impl DecodeTrace {
    fn new(device: &Device, steps: usize) -> Result<Self> {
        let pair = |_| Ok([Event::new(device)?, Event::new(device)?]);
        let events = (0..steps).map(pair).collect::<Result<_>>()?;
        Ok(Self { events, used: 0 })
    }

    /// Before a step (`end` false) and after it.
    pub(super) fn record(&mut self, stream: &Stream, end: bool) -> Result<()> {
        if let Some(pair) = self.events.get(self.used) {
            stream.record(&pair[usize::from(end)])?;
            self.used += usize::from(end);
        }
        Ok(())
    }

    fn spans(&self) -> Result<Vec<DecodeSpan>> {
        let recorded = &self.events[..self.used];
        let mut spans = Vec::with_capacity(recorded.len());
        for (i, [start, end]) in recorded.iter().enumerate() {
            let gap_ms = match i.checked_sub(1) {
                Some(before) => recorded[before][1].elapsed_ms(start)?,
                None => 0.0,
            };
            spans.push(DecodeSpan {
                busy_ms: f64::from(start.elapsed_ms(end)?),
                gap_ms: f64::from(gap_ms),
            });
        }
        Ok(spans)
    }
}

impl CudaBackend {
    /// Notes from now on when each decode step starts and ends on the device, for `steps` steps. Forgets a trace before.
    ///
    /// # Errors
    /// [`Error::Option`] for no steps or more than 65,536; [`Error::Cuda`]. Panics: none.
    pub fn trace_decode(&mut self, steps: usize) -> Result<()> {
        if steps == 0 || steps > MAX_STEPS {
            let problem = format!("is {steps}; between 1 and {MAX_STEPS} is possible");
            return Err(Error::Option {
                option: "steps",
                problem,
            });
        }
        self.trace = Some(DecodeTrace::new(self.stream.device(), steps)?);
        Ok(())
    }

    /// The decode steps since [`trace_decode`](Self::trace_decode), in order; none without. Waits for them, and ends the
    /// trace.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn take_decode_trace(&mut self) -> Result<Vec<DecodeSpan>> {
        match self.trace.take() {
            Some(trace) => trace.spans(),
            None => Ok(Vec::new()),
        }
    }
}
