//! The engine: requests in, completions out.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use lora_merge::ActiveAdapter;
use qwen3_model::MergeMode;

use crate::Error;
use crate::adapters::{AdapterSet, PolicyUpdate};
use crate::builder::EngineBuilder;
use crate::completion::{Completion, Event, RequestId, TokenCompletion};
use crate::groups::lost;
use crate::request::{Prompt, Request, SamplingParams};
use crate::runner::Runner;
use crate::scheduler::Scheduler;
use crate::statistics::Statistics;
use crate::text::TextPipeline;

/// Generates completions on one device.
///
/// Ways to use it: [`Engine::generate`] for a batch as a whole, [`Engine::generate_groups`] for several completions of each
/// prompt, [`Engine::stream`] and [`Engine::stream_groups`] for the same as they finish, and [`Engine::submit`] with
/// [`Engine::step`] for a loop of one's own, such as a server's.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Event, Request};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// let request = engine.submit(&Request::text("Count").max_new_tokens(4))?;
/// let mut tokens = 0;
/// while engine.has_unfinished() {
///     for event in engine.step()? {
///         match event {
///             Event::Token { .. } => tokens += 1,
///             Event::Finished { request: of, result, .. } => assert_eq!((of, result?.token_ids.len()), (request, tokens)),
///             _ => {}
///         }
///     }
/// }
/// assert_eq!(engine.statistics().new_tokens, tokens as u64);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
pub struct Engine<R = Box<dyn Runner + Send>> {
    scheduler: Scheduler<R>,
    text: Option<Arc<TextPipeline>>,
    /// Events of other requests that came while a stream was being read.
    backlog: VecDeque<Event>,
    pub(crate) adapters: AdapterSet,
}

impl<R> std::fmt::Debug for Engine<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("scheduler", &self.scheduler)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Settings for an engine, to be built from a model folder.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::new()
    }
}

impl<R: Runner> Engine<R> {
    /// An engine over a runner of one's own. Without `text` prompts must be token ids and completions have no text.
    ///
    /// # Errors
    /// The runner's shape cannot work.
    pub fn with_runner(
        runner: R,
        eos_token_ids: Vec<u32>,
        text: Option<Arc<TextPipeline>>,
    ) -> Result<Self, Error> {
        Ok(Self {
            scheduler: Scheduler::new(runner, eos_token_ids)?.with_text(text.clone()),
            text,
            backlog: VecDeque::new(),
            adapters: AdapterSet::default(),
        })
    }

    /// Sets the seed from which requests without one get theirs; see [`Scheduler::set_seed`].
    pub fn set_seed(&mut self, seed: u64) {
        self.scheduler.set_seed(seed);
    }

    /// Accepts a request. Each of its completions ends with an [`Event::Finished`]; if it asks for more than one,
    /// [`Event::GroupFinished`] follows the last.
    ///
    /// # Errors
    /// The prompt cannot be tokenized, or the request could never be completed: see [`Scheduler::submit`].
    pub fn submit(&mut self, request: &Request) -> Result<RequestId, Error> {
        let prompt = self.encode(&request.prompt)?;
        let policy = request.policy.as_deref();
        self.scheduler
            .submit_under(prompt, &request.sampling, request.n, policy)
    }

    /// Accepts a prompt that has been tokenized already.
    ///
    /// # Errors
    /// As for [`Scheduler::submit`].
    pub fn submit_token_ids(
        &mut self,
        prompt: Vec<u32>,
        sampling: &SamplingParams,
    ) -> Result<RequestId, Error> {
        self.scheduler.submit(prompt, sampling)
    }

    /// The token ids of a prompt.
    ///
    /// # Errors
    /// As for [`TextPipeline::encode_within`] with the longest sequence of this engine, and [`Error::NoTokenizer`].
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, Error> {
        match (prompt, &self.text) {
            (Prompt::TokenIds(ids), _) => Ok(ids.clone()),
            (_, Some(text)) => text.encode_within(prompt, self.scheduler.max_tokens()),
            (_, None) => Err(Error::NoTokenizer),
        }
    }

    /// Takes one step and gives what it brought about. Empty if there is nothing to do.
    ///
    /// # Errors
    /// The step failed and all unfinished requests are given up; see [`Scheduler::step`].
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        if let Err(error) = self.scheduler.step(&mut events) {
            self.forget_given_up();
            return Err(error);
        }
        let text = self.text.as_deref();
        Ok(self
            .backlog
            .drain(..)
            .chain(events.into_iter().map(|event| with_text(event, text)))
            .collect())
    }

    /// Changes the policy; what the steps under way bring about is kept for the next [`Engine::step`].
    pub(crate) fn change_policy(
        &mut self,
        active: &[ActiveAdapter],
        mode: MergeMode,
    ) -> Result<PolicyUpdate, Error> {
        let mut events = Vec::new();
        let update = self.scheduler.set_adapters(active, mode, &mut events);
        self.keep(events);
        update
    }

    /// The same for policies that are served by name.
    pub(crate) fn change_named_policies(
        &mut self,
        policies: &[(String, Vec<ActiveAdapter>)],
    ) -> Result<PolicyUpdate, Error> {
        let mut events = Vec::new();
        let update = self.scheduler.serve_policies(policies, &mut events);
        self.keep(events);
        update
    }

    fn keep(&mut self, events: Vec<Event<TokenCompletion>>) {
        let text = self.text.as_deref();
        self.backlog
            .extend(events.into_iter().map(|event| with_text(event, text)));
        if !self.scheduler.has_unfinished() {
            self.forget_given_up();
        }
    }

    /// Of results kept, leaves those of completions that have ended: nothing more comes of the others.
    fn forget_given_up(&mut self) {
        let ended = |event: &Event| match event {
            Event::Finished { request, index, .. } => Some((*request, *index)),
            _ => None,
        };
        let ended: HashSet<_> = self.backlog.iter().filter_map(ended).collect();
        self.backlog.retain(|event| match event {
            Event::Token { request, index, .. } => ended.contains(&(*request, *index)),
            _ => true,
        });
    }

    /// Whether any request waits or runs, or has results that no [`Engine::step`] has given yet.
    pub fn has_unfinished(&self) -> bool {
        self.scheduler.has_unfinished() || !self.backlog.is_empty()
    }

    /// Ends a request without a completion; no event of it follows. False if it is not unfinished.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let cancelled = self.scheduler.cancel(request);
        if cancelled {
            self.backlog.retain(|event| event.request() != request);
        }
        cancelled
    }

    /// Keeps pages of computed prefixes for later requests, or no longer: see [`EngineBuilder::prefix_cache`].
    ///
    /// # Errors
    /// Those of the page table, which are defects.
    pub fn set_prefix_cache(&mut self, on: bool) -> Result<(), Error> {
        self.scheduler.set_prefix_cache(on)
    }

    /// Forgets the pages kept for later requests, if there are any. A change of policy does so by itself.
    ///
    /// # Errors
    /// Those of the page table, which are defects.
    pub fn clear_prefix_cache(&mut self) -> Result<(), Error> {
        self.scheduler.clear_prefix_cache()
    }

    /// Completes all requests once. The results are in the order of the requests; a request that is refused or fails
    /// has its error there and does not disturb the others. For requests with more than one completion there is
    /// [`Engine::generate_groups`]; here they are refused.
    ///
    /// # Errors
    /// The device failed: no result is left.
    pub fn generate(&mut self, requests: &[Request]) -> Result<Vec<Result<Completion, Error>>, Error> {
        let mut results: Vec<_> = requests.iter().map(|_| None).collect();
        let once = |request: &Request| match request.n {
            1 => Ok(()),
            n => Err(Error::InvalidParameter {
                parameter: "n",
                value: n.to_string(),
                advice: "generate gives one completion per request, use generate_groups",
            }),
        };
        for finished in self.stream_if(requests, once) {
            let Finished { index, result, .. } = finished?;
            results[index] = Some(result);
        }
        let results = results.into_iter().map(|result| result.ok_or_else(lost));
        results.collect()
    }

    /// Completes all requests, one completion at a time as they finish. Dropping the iterator cancels what is left.
    pub fn stream(&mut self, requests: &[Request]) -> Stream<'_, R> {
        self.stream_if(requests, |_| Ok(()))
    }

    fn stream_if(
        &mut self,
        requests: &[Request],
        check: impl Fn(&Request) -> Result<(), Error>,
    ) -> Stream<'_, R> {
        let mut ready = VecDeque::new();
        let mut open = HashMap::new();
        for (index, request) in requests.iter().enumerate() {
            match check(request).and_then(|()| self.submit(request)) {
                Ok(id) => {
                    let group = request.n > 1;
                    open.insert(id, Open { index, group });
                }
                Err(error) => ready.push_back(Finished {
                    index,
                    completion: 0,
                    result: Err(error),
                }),
            }
        }
        Stream {
            engine: self,
            open,
            ready,
        }
    }

    /// Makes sequences that decode wait less for the prompts of others, at the cost of tokens per second; see
    /// [`Scheduler::favor_latency`]. A server's choice.
    pub fn favor_latency(&mut self) {
        self.scheduler.favor_latency();
    }

    /// The scheduler, to look at.
    pub fn scheduler(&self) -> &Scheduler<R> {
        &self.scheduler
    }

    /// The runner, to look at.
    pub fn runner(&self) -> &R {
        self.scheduler.runner()
    }

    pub(crate) fn runner_mut(&mut self) -> &mut R {
        self.scheduler.runner_mut()
    }

    /// Tokenizer and chat templates, if there are any.
    pub fn text(&self) -> Option<&Arc<TextPipeline>> {
        self.text.as_ref()
    }

    /// Counters since the engine was made.
    pub fn statistics(&self) -> &Statistics {
        self.scheduler.statistics()
    }
}

fn with_text(event: Event<TokenCompletion>, text: Option<&TextPipeline>) -> Event {
    match event {
        Event::Token {
            request,
            index,
            token,
        } => Event::Token {
            request,
            index,
            token,
        },
        Event::GroupFinished { request } => Event::GroupFinished { request },
        Event::Finished {
            request,
            index,
            result,
        } => {
            let result = result.and_then(|completion| {
                let text = match (completion.text, text) {
                    (Some(text), _) => text,
                    (None, Some(text)) => text.decode(&completion.token_ids)?,
                    (None, None) => String::new(),
                };
                Ok(Completion {
                    index: completion.index,
                    prompt_token_ids: completion.prompt_token_ids,
                    token_ids: completion.token_ids,
                    text,
                    finish_reason: completion.finish_reason,
                    stop_reason: completion.stop_reason,
                    logprobs: completion.logprobs,
                    sampled_logprobs: completion.sampled_logprobs,
                    top_logprobs: completion.top_logprobs,
                    policies: completion.policies,
                })
            });
            Event::Finished {
                request,
                index,
                result,
            }
        }
    }
}

/// One finished completion of a [`Stream`].
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Finished, Request};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).build()?;
/// let requests = [Request::text("Count").max_new_tokens(2), Request::text("")];
/// for finished in engine.stream(&requests) {
///     let Finished { index, result, .. } = finished?; // an error here would be the device's
///     assert_eq!(result.is_ok(), index == 0); // the empty prompt alone is refused
/// }
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct Finished {
    /// Index of the request in the slice given to [`Engine::stream`].
    pub index: usize,
    /// Number of the completion among those of the request; 0 if the request was refused.
    pub completion: usize,
    /// The completion, or why it alone failed, or why the request was refused.
    pub result: Result<Completion, Error>,
}

/// Completions as they finish. An `Err` item means that the device failed; nothing follows it.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Request, Stream};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// let requests = [Request::text("Count").max_new_tokens(9), Request::text("Count").max_new_tokens(2)];
/// let stream: Stream<'_, _> = engine.stream(&requests);
/// let order: Vec<usize> = stream.map(|finished| finished.map(|finished| finished.index)).collect::<Result<_, _>>()?;
/// assert_eq!(order, [1, 0], "the shorter one is done first");
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct Stream<'a, R: Runner> {
    engine: &'a mut Engine<R>,
    open: HashMap<RequestId, Open>,
    pub(crate) ready: VecDeque<Finished>,
}

/// A request whose completions are not all there.
#[derive(Clone, Copy, Debug)]
struct Open {
    index: usize,
    /// Whether it asked for more than one completion.
    group: bool,
}

impl<R: Runner> Iterator for Stream<'_, R> {
    type Item = Result<Finished, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(finished) = self.ready.pop_front() {
                return Some(Ok(finished));
            }
            if self.open.is_empty() {
                return None;
            }
            let events = match self.engine.step() {
                Ok(events) => events,
                Err(error) => {
                    self.open.clear();
                    return Some(Err(error));
                }
            };
            let mut others = VecDeque::new();
            for event in events {
                let request = event.request();
                let Some(&Open { index, group }) = self.open.get(&request) else {
                    others.push_back(event);
                    continue;
                };
                let ends_group = matches!(event, Event::GroupFinished { .. });
                if ends_group || (!group && matches!(event, Event::Finished { .. })) {
                    self.open.remove(&request);
                }
                if let Event::Finished {
                    index: completion,
                    result,
                    ..
                } = event
                {
                    self.ready.push_back(Finished {
                        index,
                        completion,
                        result,
                    });
                }
            }
            self.engine.backlog = others;
        }
    }
}

impl<R: Runner> Drop for Stream<'_, R> {
    fn drop(&mut self) {
        for &request in self.open.keys() {
            self.engine.cancel(request);
        }
    }
}
