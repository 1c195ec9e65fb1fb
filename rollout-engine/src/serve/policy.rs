//! Policies by name: the base model and the adapters that clients have loaded.
//!
//! A request is bound to a [`Policy`] when it arrives. What a name means can change afterwards (an adapter is loaded
//! anew under it, or unloaded); the request keeps the policy that it was bound to.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use lora_merge::Adapter;

use super::error::ApiError;
use super::fingerprint;

/// Weights without adapters.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Base {
    /// 0 for the weights that the server started with, then 1, 2, …
    pub(super) number: u64,
    /// Their folder; `None` of an engine that did not come from one.
    pub(super) dir: Option<PathBuf>,
    /// What the folder's files looked like, to recognise a repeated request, and weights that are gone.
    pub(super) fingerprint: Vec<u8>,
}

impl Base {
    /// An error if the folder's weights are not those of this base any more.
    pub(super) fn still_there(&self) -> Result<(), String> {
        let Some(dir) = &self.dir else { return Ok(()) };
        match fingerprint::of_folder(dir) {
            Ok(now) if now == self.fingerprint => Ok(()),
            Ok(_) => Err(format!(
                "{} has been written to: its weights are not those that this policy was made of",
                dir.display()
            )),
            Err(error) => Err(format!("{}: {error}", dir.display())),
        }
    }
}

/// What a request is answered under.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) name: String,
    /// Rises with every policy that the server comes to know; 0 is the base model at the start.
    pub(super) version: u64,
    pub(super) base: Arc<Base>,
    pub(super) adapter: Option<Arc<Adapter>>,
    /// Where the adapter came from.
    pub(super) path: Option<PathBuf>,
}

#[derive(Debug)]
struct Known {
    base: Arc<Policy>,
    adapters: BTreeMap<String, Arc<Policy>>,
    next_version: u64,
}

/// All policies that requests can name.
#[derive(Debug)]
pub(super) struct Policies {
    known: Mutex<Known>,
    max_adapters: usize,
}

/// What a load did.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) policy: Arc<Policy>,
    /// False if exactly this was there already.
    pub(super) changed: bool,
    /// What the name meant before, if it was known.
    before: Option<Arc<Policy>>,
}

impl Policies {
    pub(super) fn new(base_name: String, base: Base, max_adapters: usize) -> Self {
        let base = Arc::new(Policy {
            name: base_name,
            version: 0,
            base: Arc::new(base),
            adapter: None,
            path: None,
        });
        Self {
            known: Mutex::new(Known {
                base,
                adapters: BTreeMap::new(),
                next_version: 1,
            }),
            max_adapters,
        }
    }

    /// The lock is held for map operations only, which do not panic half-way.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The base model.
    pub(super) fn base(&self) -> Arc<Policy> {
        self.known().base.clone()
    }

    /// The adapters, by name.
    pub(super) fn adapters(&self) -> Vec<Arc<Policy>> {
        self.known().adapters.values().cloned().collect()
    }

    /// The policy of this name.
    ///
    /// # Errors
    /// 404 if there is none.
    pub(super) fn find(&self, name: &str) -> Result<Arc<Policy>, ApiError> {
        let known = self.known();
        // An adapter may have taken the base model's name.
        let named = known.adapters.get(name).cloned();
        let base = || (name == known.base.name).then(|| known.base.clone());
        named.or_else(base).ok_or_else(|| {
            let mut error = ApiError::new(
                StatusCode::NOT_FOUND,
                format!("the model {name:?} does not exist: see /v1/models"),
            );
            error.param = Some("model".into());
            error.code("model_not_found")
        })
    }

    /// Gives an adapter a name, which may be the base model's: until the adapter is unloaded it is meant then. The same
    /// adapter under the same name again changes nothing.
    ///
    /// # Errors
    /// 400 for a name that cannot be used, or is in use for another adapter unless `in_place`; 409 if there are too many.
    pub(super) fn load(
        &self,
        name: &str,
        adapter: Arc<Adapter>,
        path: PathBuf,
        in_place: bool,
    ) -> Result<Loaded, ApiError> {
        check_name(name)?;
        let mut known = self.known();
        match known.adapters.get(name) {
            Some(policy) if has_adapter(policy, &adapter) => {
                return Ok(Loaded {
                    policy: policy.clone(),
                    changed: false,
                    before: None,
                });
            }
            Some(_) if !in_place => {
                return Err(ApiError::bad_param(
                    "lora_name",
                    format_args!(
                        "{name:?} is loaded with other weights: set load_inplace, unload it first, or use a new name"
                    ),
                ));
            }
            None if known.adapters.len() >= self.max_adapters => {
                return Err(ApiError::new(
                    StatusCode::CONFLICT,
                    format!(
                        "{} adapters are loaded, which is the limit: unload one",
                        self.max_adapters
                    ),
                ));
            }
            _ => {}
        }
        let policy = Arc::new(Policy {
            name: name.to_string(),
            version: known.next_version,
            base: known.base.base.clone(),
            adapter: Some(adapter),
            path: Some(path),
        });
        known.next_version += 1;
        let before = known.adapters.insert(name.to_string(), policy.clone());
        Ok(Loaded {
            policy,
            changed: true,
            before,
        })
    }

    /// Takes back a load of an adapter that cannot be applied: the name means again what it did before. Nothing happens if
    /// the load changed nothing, or if the name means something else by now.
    pub(super) fn withdraw(&self, loaded: Loaded) {
        let mut known = self.known();
        let name = &loaded.policy.name;
        let now = known.adapters.get(name);
        if loaded.changed && now.is_some_and(|now| now.version == loaded.policy.version) {
            match loaded.before {
                Some(before) => known.adapters.insert(name.clone(), before),
                None => known.adapters.remove(name),
            };
        }
    }

    /// Forgets a name. False if it was not known.
    pub(super) fn unload(&self, name: &str) -> bool {
        self.known().adapters.remove(name).is_some()
    }

    /// Replaces the base weights. Every adapter over them becomes a policy with a new version.
    pub(super) fn replace_base(&self, dir: PathBuf, fingerprint: Vec<u8>) -> Loaded {
        let mut known = self.known();
        let before = known.base.base.clone();
        if before.dir.as_ref() == Some(&dir) && before.fingerprint == fingerprint {
            return Loaded {
                policy: known.base.clone(),
                changed: false,
                before: None,
            };
        }
        let base = Arc::new(Base {
            number: before.number + 1,
            dir: Some(dir),
            fingerprint,
        });
        let mut next_version = known.next_version;
        let mut over_new_base = |policy: &Policy| {
            next_version += 1;
            Arc::new(Policy {
                name: policy.name.clone(),
                version: next_version - 1,
                base: base.clone(),
                adapter: policy.adapter.clone(),
                path: policy.path.clone(),
            })
        };
        known.base = over_new_base(&known.base);
        known.adapters = known
            .adapters
            .iter()
            .map(|(name, policy)| (name.clone(), over_new_base(policy)))
            .collect();
        known.next_version = next_version;
        Loaded {
            policy: known.base.clone(),
            changed: true,
            before: None,
        }
    }
}

fn has_adapter(policy: &Policy, adapter: &Adapter) -> bool {
    policy
        .adapter
        .as_ref()
        .is_some_and(|known| known.digest() == adapter.digest())
}

fn check_name(name: &str) -> Result<(), ApiError> {
    let fine = !name.is_empty() && name.len() <= 256 && name.chars().all(|c| !c.is_control());
    match fine {
        true => Ok(()),
        false => Err(ApiError::bad_param(
            "lora_name",
            "use 1 to 256 bytes without control characters",
        )),
    }
}
