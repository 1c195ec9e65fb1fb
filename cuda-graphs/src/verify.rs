//! Does a graph do what the eager run does?

use crate::buffer::DeviceMemory;
use crate::capture::Graph;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// What a successful check compared.
///
/// ```
/// use cuda_graphs::VerifyReport;
///
/// let report = VerifyReport { buffers: 2, bytes: 4096, changed: 96 };
/// assert!(report.changed > 0, "a replay that writes nothing proves nothing");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct VerifyReport {
    /// Output buffers compared.
    pub buffers: usize,
    /// Bytes compared.
    pub bytes: usize,
    /// Bytes that the run changed at all. 0 means that nothing was shown.
    pub changed: usize,
}

/// Runs `eager`, then replays `graph` from the same content of `state` and `outputs`, and compares `outputs` bit for
/// bit. `state` is everything else that the run both reads and changes. Goes through the host; waits.
///
/// # Errors
/// [`Error::ReplayDiffers`] for the first buffer that differs; those of `eager`; [`Error::Driver`].
pub fn verify<E: From<Error>>(
    stream: &Stream,
    graph: &Graph,
    state: &[&dyn DeviceMemory],
    outputs: &[&dyn DeviceMemory],
    eager: impl FnOnce(&Stream) -> Result<(), E>,
) -> Result<VerifyReport, E> {
    let all: Vec<_> = state.iter().chain(outputs).collect();
    let before: Vec<Vec<u8>> = all
        .iter()
        .map(|memory| stream.download(memory.bytes()))
        .collect::<Result<_>>()?;
    eager(stream)?;
    let expected: Vec<Vec<u8>> = outputs
        .iter()
        .map(|memory| stream.download(memory.bytes()))
        .collect::<Result<_>>()?;
    for (memory, content) in all.iter().zip(&before) {
        stream.upload(memory.bytes(), content)?;
    }
    graph.launch(stream)?;
    let mut report = VerifyReport {
        buffers: outputs.len(),
        bytes: 0,
        changed: 0,
    };
    for (buffer, (memory, expected)) in outputs.iter().zip(&expected).enumerate() {
        let replayed = stream.download(memory.bytes())?;
        if let Some((first, differing)) = difference(expected, &replayed) {
            return Err(Error::ReplayDiffers {
                buffer,
                first,
                differing,
                bytes: expected.len(),
            }
            .into());
        }
        report.bytes += expected.len();
        report.changed += difference(&before[state.len() + buffer], &replayed).map_or(0, |(_, count)| count);
    }
    Ok(report)
}

/// Index of the first differing byte, and how many differ.
fn difference(a: &[u8], b: &[u8]) -> Option<(usize, usize)> {
    let first = a.iter().zip(b).position(|(a, b)| a != b)?;
    Some((first, a.iter().zip(b).filter(|(a, b)| a != b).count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_counted_from_the_first() {
        assert_eq!(difference(b"same", b"same"), None);
        assert_eq!(difference(b"abcd", b"aXcY"), Some((1, 2)));
    }
}
