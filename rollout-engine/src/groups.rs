//! Several completions of one prompt, together.

use std::collections::{HashMap, HashSet};

use crate::Error;
use crate::completion::Completion;
use crate::engine::{Engine, Finished, Stream};
use crate::request::Request;
use crate::runner::Runner;

/// All completions of one request.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Group, Request};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(4).build()?;
/// let request = Request::text("Count").n(3).temperature(1.0).max_new_tokens(2);
/// let group: Group = engine.generate_groups(&[request])?.remove(0)?;
/// assert_eq!(group.all()?.iter().map(|completion| completion.index).collect::<Vec<_>>(), [0, 1, 2]);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct Group {
    /// As many as the request asked for, in order: entry `i` has index `i`. An `Err` says why that one alone failed.
    pub completions: Vec<Result<Completion, Error>>,
}

impl Group {
    /// The completions, or the first of their errors.
    ///
    /// # Errors
    /// That of the first completion that failed.
    pub fn all(self) -> Result<Vec<Completion>, Error> {
        self.completions.into_iter().collect()
    }
}

/// One finished group of a [`GroupStream`].
#[derive(Debug)]
pub struct FinishedGroup {
    /// Index of the request in the slice given to [`Engine::stream_groups`].
    pub index: usize,
    /// Its completions, or why the request was refused.
    pub result: Result<Group, Error>,
}

/// Groups as they become complete. An `Err` item means that the device failed; nothing follows it.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, FinishedGroup, GroupStream, Request};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(4).build()?;
/// let requests = [Request::text("Count").n(2).max_new_tokens(2), Request::text("")];
/// let mut groups: GroupStream<'_, _> = engine.stream_groups(&requests);
/// for finished in &mut groups {
///     let FinishedGroup { index, result } = finished?; // an error here would be the device's
///     assert_eq!(result.is_ok(), index == 0); // the empty prompt alone is refused
/// }
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct GroupStream<'a, R: Runner> {
    stream: Stream<'a, R>,
    refused: HashSet<usize>,
    /// Completions of each request under way.
    open: HashMap<usize, Parts>,
}

#[derive(Debug)]
struct Parts {
    missing: usize,
    completions: Vec<Option<Result<Completion, Error>>>,
}

impl<R: Runner> Engine<R> {
    /// Completes all requests, each as often as it asks for ([`Request::n`]). The results are in the order of the
    /// requests; a request that is refused has its error there and does not disturb the others.
    ///
    /// ```
    /// use rollout_engine::{Engine, Request};
    /// # fn main() -> Result<(), rollout_engine::Error> {
    /// let mut engine = Engine::builder().max_batch_size(8).build()?;
    /// for group in engine.generate_groups(&[Request::user("What is 17 plus 4?").n(4)])? {
    ///     assert_eq!(group?.all()?.len(), 4);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The device failed: no result is left.
    pub fn generate_groups(&mut self, requests: &[Request]) -> Result<Vec<Result<Group, Error>>, Error> {
        let mut results: Vec<_> = requests.iter().map(|_| None).collect();
        for finished in self.stream_groups(requests) {
            let FinishedGroup { index, result } = finished?;
            results[index] = Some(result);
        }
        let results = results.into_iter().map(|result| result.ok_or_else(lost));
        results.collect()
    }

    /// Completes all requests, one group at a time as they become complete. Dropping the iterator cancels what is left.
    pub fn stream_groups(&mut self, requests: &[Request]) -> GroupStream<'_, R> {
        let stream = self.stream(requests);
        let refused: HashSet<_> = stream.ready.iter().map(|finished| finished.index).collect();
        let accepted = requests.iter().enumerate().filter(|(i, _)| !refused.contains(i));
        let parts = |(index, request): (usize, &Request)| {
            let completions = (0..request.n).map(|_| None).collect();
            let missing = request.n;
            (index, Parts { missing, completions })
        };
        GroupStream {
            open: accepted.map(parts).collect(),
            stream,
            refused,
        }
    }
}

impl<R: Runner> Iterator for GroupStream<'_, R> {
    type Item = Result<FinishedGroup, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let Finished {
                index,
                completion,
                result,
            } = match self.stream.next()? {
                Ok(finished) => finished,
                Err(error) => return Some(Err(error)),
            };
            if self.refused.contains(&index) {
                let result = result.and(Err(lost()));
                return Some(Ok(FinishedGroup { index, result }));
            }
            let Some(parts) = self.open.get_mut(&index) else {
                continue;
            };
            if let Some(place @ None) = parts.completions.get_mut(completion) {
                *place = Some(result);
                parts.missing -= 1;
            }
            if parts.missing == 0
                && let Some(parts) = self.open.remove(&index)
            {
                let completions = parts.completions.into_iter().flatten().collect();
                let result = Ok(Group { completions });
                return Some(Ok(FinishedGroup { index, result }));
            }
        }
    }
}

/// For a result that never came.
pub(crate) fn lost() -> Error {
    Error::Stalled {
        waiting: 0,
        running: 0,
        free_pages: 0,
    }
}

/// GRPO's advantages of the completions of one prompt: how much better each is than the others, in standard deviations of the
/// group's rewards. All 0 if the rewards are equal.
///
/// ```
/// use rollout_engine::group_advantages;
///
/// let advantages = group_advantages(&[1.0, 0.0, 0.0, 1.0]);
/// assert!(advantages.iter().zip([1.0, -1.0, -1.0, 1.0]).all(|(a, b)| (a - b).abs() < 1e-3));
/// assert_eq!(group_advantages(&[0.5, 0.5]), [0.0, 0.0]);
/// ```
pub fn group_advantages(rewards: &[f64]) -> Vec<f64> {
    let n = rewards.len().max(1) as f64;
    let mean = rewards.iter().sum::<f64>() / n;
    let deviation = (rewards.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>() / n).sqrt();
    // As in trainers: a group whose rewards hardly differ says little.
    let scale = 1.0 / (deviation + 1e-4);
    rewards.iter().map(|reward| (reward - mean) * scale).collect()
}
