//! Which policy an engine serves: adapters from a folder, from bytes or from tensors, and the change between them.
//!
//! A change is taken between two steps. Steps under way are waited for first: their tokens belong to the policy they
//! were sampled under. Then the weights change, all or nothing. Then every sequence that has a slot gives its pages
//! back and is computed anew under the new policy, because keys and values of the old one are no longer those of the
//! model. Its completion tells, token by token, which policy sampled it.
//!
//! ```text
//!   policy 1           ║ policy 2
//!   step ─ step ─ step ║ prefill of prompt + known tokens ─ step ─ step
//!                      ║
//!   tokens  a b c d e  ║ f g h …        policies: [{first_token 0, policy 1}, {first_token 5, policy 2}]
//! ```
//!
//! What may surprise: there is no state "loaded but not in force". [`Engine::load_adapter`] reads an adapter and serves
//! it, or fails and changes nothing.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lora_merge::{ActiveAdapter, Adapter, AdapterConfig, DriftSubject, PolicyVersion, TensorSlice};
use qwen3_model::{AdapterReport, MergeMode};
use serde::{Serialize, Serializer};

use crate::Error;
use crate::engine::Engine;
use crate::runner::Runner;

/// Where an adapter comes from.
///
/// ```
/// use rollout_engine::{AdapterSource, DeviceChoice, Engine};
///
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/adapters/qv-r8");
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).build()?;
/// engine.load_adapter(folder)?; // a PEFT folder
/// let config_json = &std::fs::read_to_string(format!("{folder}/adapter_config.json")).expect("is there");
/// let safetensors = &std::fs::read(format!("{folder}/adapter_model.safetensors")).expect("is there");
/// let update = engine.load_adapter(AdapterSource::Bytes { config_json, safetensors })?; // as a trainer may send it
/// assert!(!update.changed, "the same adapter, under a new number");
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AdapterSource<'a> {
    /// A PEFT folder: `adapter_config.json` and `adapter_model.safetensors`. [`Engine::refresh`] reads it again.
    Folder(Cow<'a, Path>),
    /// The two files' contents.
    Bytes {
        /// `adapter_config.json`.
        config_json: &'a str,
        /// `adapter_model.safetensors`.
        safetensors: &'a [u8],
    },
    /// Tensors in memory, by PEFT's names.
    Tensors {
        /// What `adapter_config.json` would say.
        config: AdapterConfig,
        /// The tensors; copied.
        tensors: &'a [TensorSlice<'a>],
    },
    /// An adapter that has been read already.
    Loaded(Arc<Adapter>),
}

impl<'a> From<&'a Path> for AdapterSource<'a> {
    fn from(folder: &'a Path) -> Self {
        Self::Folder(Cow::Borrowed(folder))
    }
}

impl<'a> From<&'a str> for AdapterSource<'a> {
    fn from(folder: &'a str) -> Self {
        Self::Folder(Cow::Borrowed(Path::new(folder)))
    }
}

impl From<PathBuf> for AdapterSource<'_> {
    fn from(folder: PathBuf) -> Self {
        Self::Folder(Cow::Owned(folder))
    }
}

impl<'a> From<&'a PathBuf> for AdapterSource<'a> {
    fn from(folder: &'a PathBuf) -> Self {
        Self::Folder(Cow::Borrowed(folder))
    }
}

impl From<Arc<Adapter>> for AdapterSource<'_> {
    fn from(adapter: Arc<Adapter>) -> Self {
        Self::Loaded(adapter)
    }
}

impl From<Adapter> for AdapterSource<'_> {
    fn from(adapter: Adapter) -> Self {
        Self::Loaded(Arc::new(adapter))
    }
}

impl AdapterSource<'_> {
    fn read(self, weight: f32) -> Result<Served, Error> {
        let mut folder = None;
        let adapter = match self {
            Self::Folder(path) => {
                let adapter = Arc::new(Adapter::load(&path)?);
                folder = Some(path.into_owned());
                adapter
            }
            Self::Bytes {
                config_json,
                safetensors,
            } => Arc::new(Adapter::from_bytes(config_json, safetensors)?),
            Self::Tensors { config, tensors } => Arc::new(Adapter::from_tensors(config, tensors)?),
            Self::Loaded(adapter) => adapter,
        };
        Ok(Served {
            active: ActiveAdapter { adapter, weight },
            folder,
        })
    }
}

/// An adapter in force, and where to read it again.
#[derive(Clone, Debug)]
struct Served {
    active: ActiveAdapter,
    folder: Option<PathBuf>,
}

/// The adapters of an engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdapterSet {
    mode: MergeMode,
    served: Vec<Served>,
    /// Served by name, in place of those.
    named: Vec<(String, Served)>,
}

impl AdapterSet {
    /// Reads adapters that no engine serves yet.
    pub(crate) fn read<'a>(
        mode: MergeMode,
        sources: impl IntoIterator<Item = (AdapterSource<'a>, f32)>,
    ) -> Result<Self, Error> {
        let served = sources
            .into_iter()
            .map(|(source, weight)| source.read(weight))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            mode,
            served,
            named: Vec::new(),
        })
    }

    /// How these adapters will be applied.
    pub(crate) fn set_mode(&mut self, mode: MergeMode) {
        self.mode = mode;
    }
}

/// What a change of policy did.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, PolicyUpdate};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// let update: PolicyUpdate = engine.load_adapters([])?; // no adapter: the base model
/// assert_eq!((update.adapted_modules, update.differs_from_base), (0, false));
/// assert_eq!(update.version, engine.policy());
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyUpdate {
    /// The policy now in force.
    pub version: PolicyVersion,
    /// SHA-256 of the adapters of every policy that can be sampled under, in order.
    pub policies: Vec<[u8; 32]>,
    /// How its adapters are applied.
    pub mode: MergeMode,
    /// Matrices that an adapter touches.
    pub adapted_modules: usize,
    /// Whether the update changed any weight that is served (or, for adapters at run time, which adapters apply).
    /// `false` means that the policy is the one from before under a new number.
    pub changed: bool,
    /// Whether the policy differs from the base model at all. `false` with adapters means that they have no effect.
    pub differs_from_base: bool,
    /// Bytes of the pristine copy of weights, beyond what is served. 0 where it is a mapped file.
    pub pristine_bytes: u64,
    /// Bytes of merged weights held beside the base.
    pub merged_bytes: u64,
    /// Wall time of writing the weights.
    pub merge_elapsed: Duration,
    /// Wall time of the change, without the time of reading adapters and of steps that were waited for.
    pub elapsed: Duration,
    /// Settings of adapters that are overridden as in PEFT.
    pub warnings: Vec<String>,
    /// Requests under way that go on under the new policy, and are computed anew for it.
    pub continued_requests: usize,
}

impl From<AdapterReport> for PolicyUpdate {
    fn from(report: AdapterReport) -> Self {
        Self {
            version: report.version,
            policies: report.policies,
            mode: report.mode,
            adapted_modules: report.adapted_modules,
            changed: report.changed_modules > 0,
            differs_from_base: report.differs_from_base,
            pristine_bytes: report.memory.pristine_bytes as u64,
            merged_bytes: report.memory.merged_bytes as u64,
            merge_elapsed: report.merge_elapsed,
            elapsed: report.elapsed,
            warnings: report.warnings,
            continued_requests: 0,
        }
    }
}

impl PolicyUpdate {
    /// A remark for the user if the update had no effect, or none on the base model.
    pub fn remark(&self) -> Option<&'static str> {
        if self.adapted_modules > 0 && !self.differs_from_base {
            Some("the adapters change no weight: completions are those of the base model")
        } else if !self.changed && self.version.number > 1 {
            Some("the update changed no weight: the policy is the same as before")
        } else {
            None
        }
    }
}

/// A policy that requests choose by name.
///
/// ```
/// use rollout_engine::adapters::{NamedPolicy, base_policy};
///
/// let policy = NamedPolicy { name: "student".into(), version: base_policy() };
/// assert_eq!(policy.version.number, 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPolicy {
    /// What [`Request::policy`](crate::Request::policy) says.
    pub name: String,
    /// The version that completions carry: the number of the change that brought the policy, and the digest of its adapters.
    pub version: PolicyVersion,
}

/// From which token on a completion was sampled under a policy.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, PolicySpan, Request};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// let completion = engine.generate(&[Request::text("Count").max_new_tokens(3)])?.remove(0)?;
/// // Nothing changed meanwhile: one policy from the first token on.
/// let version = engine.policy();
/// assert_eq!(completion.policies, [PolicySpan { first_token: 0, version }]);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PolicySpan {
    /// Index of the span's first token within the completion.
    pub first_token: usize,
    /// The policy: `number` (0 is the base model before any change) and `sha256` of adapters and weights.
    #[serde(flatten, serialize_with = "version_fields")]
    pub version: PolicyVersion,
}

#[derive(Serialize)]
struct VersionFields {
    number: u64,
    sha256: String,
}

fn version_fields<S: Serializer>(version: &PolicyVersion, serializer: S) -> Result<S::Ok, S::Error> {
    VersionFields {
        number: version.number,
        sha256: version.sha256_hex(),
    }
    .serialize(serializer)
}

/// The policy of a base model that no adapter has touched: number 0 and the digest of no adapters.
pub fn base_policy() -> PolicyVersion {
    let digest = lora_merge::resolve(&[], &[]).map(|resolved| resolved.digest());
    PolicyVersion {
        number: 0,
        sha256: digest.unwrap_or_default(),
    }
}

impl<R: Runner> Engine<R> {
    /// Reads an adapter and makes it the policy, in place of all adapters in force. To be called after every optimiser
    /// step; requests under way go on under the new policy, see [the module](crate::adapters).
    ///
    /// # Errors
    /// [`Error::Adapter`] for an adapter that is broken or does not fit the model; errors of the device. The previous
    /// policy is then fully in force, and requests under way go on under it, unless the error is one of a step that
    /// was under way, as from [`Engine::step`]. Panics: none.
    pub fn load_adapter<'a>(&mut self, source: impl Into<AdapterSource<'a>>) -> Result<PolicyUpdate, Error> {
        self.load_adapters([(source.into(), 1.0)])
    }

    /// As [`Engine::load_adapter`], for any number of adapters with a factor on the scaling of each; 1 is what it
    /// was trained with. The order does not matter. None is the base model.
    ///
    /// # Errors
    /// As for [`Engine::load_adapter`]. Panics: none.
    pub fn load_adapters<'a>(
        &mut self,
        sources: impl IntoIterator<Item = (AdapterSource<'a>, f32)>,
    ) -> Result<PolicyUpdate, Error> {
        let set = AdapterSet::read(self.adapters.mode, sources)?;
        self.serve(set.served)
    }

    /// Serves several policies at once over the base weights: each an adapter at run time, chosen by a request's
    /// [`policy`](crate::Request::policy). Requests that name none are sampled from the base model. They replace all adapters
    /// in force; [`Engine::load_adapter`] and its kin replace them. A request under way that names a policy goes on under the
    /// new one of that name: undisturbed if it is the one of before, computed anew otherwise.
    ///
    /// ```
    /// use rollout_engine::{DeviceChoice, Engine, Request};
    ///
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/adapters/qv-r8");
    /// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
    /// engine.serve_policies([("student", folder)])?;
    /// let request = Request::text("Count").max_new_tokens(2);
    /// let both = engine.generate(&[request.clone().policy("student"), request])?;
    /// let versions = both.into_iter().map(|c| Ok(c?.policies[0].version)).collect::<Result<Vec<_>, rollout_engine::Error>>()?;
    /// assert_eq!(versions, [engine.named_policies()[0].version, engine.policy()]);
    /// # Ok::<(), rollout_engine::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Engine::load_adapter`]; [`Error::Policy`] for an adapter that does not fit the model, or has factors that the
    /// device's format cannot hold; [`Error::InvalidSetting`] for a name that occurs twice; [`Error::PolicyInUse`] if an
    /// unfinished request names a policy that would be gone. Panics: none.
    pub fn serve_policies<'a, N: Into<String>, S: Into<AdapterSource<'a>>>(
        &mut self,
        policies: impl IntoIterator<Item = (N, S)>,
    ) -> Result<PolicyUpdate, Error> {
        let named = policies
            .into_iter()
            .map(|(name, source)| Ok((name.into(), source.into().read(1.0)?)));
        let named = named.collect::<Result<Vec<_>, Error>>()?;
        self.serve_named(named)
    }

    fn serve_named(&mut self, named: Vec<(String, Served)>) -> Result<PolicyUpdate, Error> {
        let active = named
            .iter()
            .map(|(name, s)| (name.clone(), vec![s.active.clone()]));
        let update = self.change_named_policies(&active.collect::<Vec<_>>())?;
        self.adapters.served = Vec::new();
        self.adapters.named = named;
        Ok(update)
    }

    /// The policies that are served by name.
    pub fn named_policies(&self) -> &[NamedPolicy] {
        self.scheduler().named_policies()
    }

    /// Reads the adapters that came from folders again, and merges all of them from the pristine weights; policies that are
    /// served by name are served anew.
    ///
    /// # Errors
    /// As for [`Engine::load_adapter`]. Panics: none.
    pub fn refresh(&mut self) -> Result<PolicyUpdate, Error> {
        if !self.adapters.named.is_empty() {
            let read_again = |(name, served): &(String, Served)| match &served.folder {
                Some(folder) => Ok((name.clone(), AdapterSource::from(folder).read(1.0)?)),
                None => Ok((name.clone(), served.clone())),
            };
            let named = self.adapters.named.iter().map(read_again);
            let named = named.collect::<Result<Vec<_>, Error>>()?;
            return self.serve_named(named);
        }
        let read_again = |served: &Served| match &served.folder {
            Some(folder) => AdapterSource::from(folder).read(served.active.weight),
            None => Ok(served.clone()),
        };
        let served = self.adapters.served.iter().map(read_again);
        let served = served.collect::<Result<Vec<_>, _>>()?;
        self.serve(served)
    }

    /// Goes back to the base model.
    ///
    /// # Errors
    /// As for [`Engine::load_adapter`]. Panics: none.
    pub fn unload_adapters(&mut self) -> Result<PolicyUpdate, Error> {
        self.serve(Vec::new())
    }

    /// Applies the adapters in force, and those to come, merged or at run time.
    ///
    /// # Errors
    /// As for [`Engine::load_adapter`]; the previous mode is then in force. Panics: none.
    pub fn set_merge_mode(&mut self, mode: MergeMode) -> Result<PolicyUpdate, Error> {
        let before = std::mem::replace(&mut self.adapters.mode, mode);
        let update = self.serve(self.adapters.served.clone());
        if update.is_err() {
            self.adapters.mode = before;
        }
        update
    }

    /// How the adapters in force, and those to come, are applied.
    pub fn merge_mode(&self) -> MergeMode {
        self.adapters.mode
    }

    /// The policy in force.
    pub fn policy(&self) -> PolicyVersion {
        self.scheduler().policy()
    }

    /// The adapters in force.
    pub fn active_adapters(&self) -> Vec<ActiveAdapter> {
        self.adapters.served.iter().map(|s| s.active.clone()).collect()
    }

    /// Serves the adapters that an engine is built with; without any, only their mode is kept.
    pub(crate) fn serve_first(&mut self, set: AdapterSet) -> Result<Option<PolicyUpdate>, Error> {
        self.adapters.mode = set.mode;
        match set.served.is_empty() {
            true => Ok(None),
            false => self.serve(set.served).map(Some),
        }
    }

    fn serve(&mut self, served: Vec<Served>) -> Result<PolicyUpdate, Error> {
        let active: Vec<_> = served.iter().map(|s| s.active.clone()).collect();
        let update = self.change_policy(&active, self.adapters.mode)?;
        self.adapters.served = served;
        self.adapters.named.clear();
        if let Some(remark) = update.remark() {
            tracing::warn!(version = %update.version, "{remark}");
        }
        Ok(update)
    }
}

/// `verify_no_drift` over a whole engine. Afterwards the checked adapters are in force.
impl<R: Runner> DriftSubject for Engine<R> {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32], Error> {
        self.runner_mut().base_sha256()
    }

    fn served_digest(&mut self) -> Result<[u8; 32], Error> {
        self.runner_mut().served_sha256()
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<(), Error> {
        let sources = active.iter().map(|a| (a.adapter.clone().into(), a.weight));
        self.load_adapters(sources).map(drop)
    }
}
