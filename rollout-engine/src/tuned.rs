//! Tuned profiles: the options that a sweep found best for a device and a model's shape, which later runs load by themselves.
//!
//! ```text
//!   explicit settings ─▶ profile in the folder of profiles ─▶ built-in profile ─▶ defaults
//! ```
//!
//! A profile is a JSON file that `rollout tune` writes, one per device and shape, in `$ROLLOUT_TUNED_PROFILES`, or else
//! `$XDG_CONFIG_HOME/rollout/tuned`, or else `~/.config/rollout/tuned`. What a user sets always comes first. A file that
//! cannot be read is passed over with a warning in the log; one that was named explicitly is an error.

use std::path::{Path, PathBuf};

use qwen3_model::{KernelOptions, Qwen3Config};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::pool::PoolSettings;

/// Where profiles are kept; overrides the usual place. `off` uses none, not even those that are built in.
pub const PROFILES_VARIABLE: &str = "ROLLOUT_TUNED_PROFILES";
/// The form of the files.
const VERSION: u32 = 1;
/// Profiles that come with the crate, each from a sweep.
const BUILT_IN: [&str; 0] = [];

/// Which profile a runner takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TunedChoice {
    /// That of the device and the model's shape, if there is one.
    #[default]
    Usual,
    /// None.
    Off,
    /// This file; an error if it is not for the device and the model's shape.
    File(PathBuf),
}

/// The sizes that decide which kernels run and how long they take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// Layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width between the products of the MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Token ids.
    pub vocab_size: usize,
    /// Whether projections are in 4 bits.
    pub quantized: bool,
}

impl ModelShape {
    /// Of a model.
    pub fn of(config: &Qwen3Config, quantized: bool) -> Self {
        Self {
            n_layers: config.n_layers,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            vocab_size: config.vocab_size,
            quantized,
        }
    }

    fn name(&self) -> String {
        format!(
            "{}x{}-{}-{}h{}kv{}-v{}{}",
            self.n_layers,
            self.hidden_size,
            self.intermediate_size,
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            self.vocab_size,
            if self.quantized { "-4bit" } else { "" }
        )
    }
}

/// What a sweep may choose; `None` leaves the default.
///
/// ```
/// use rollout_engine::TunedOptions;
///
/// let mut options = TunedOptions::default();
/// options.page_size = Some(64);
/// assert!(options.kernels.is_empty(), "kernels keep their defaults");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct TunedOptions {
    /// Tokens of a page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_size: Option<usize>,
    /// Prompt tokens of a step at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_prefill_tokens: Option<usize>,
    /// Options of a GPU's kernels.
    #[serde(skip_serializing_if = "KernelOptions::is_empty")]
    pub kernels: KernelOptions,
}

/// How a profile came about.
///
/// ```
/// use rollout_engine::TunedBy;
///
/// let sweep = TunedBy {
///     n_prompts: vec![64],
///     max_new_tokens: 512,
///     tokens_per_s: vec![110.0],
///     default_tokens_per_s: vec![100.0],
///     measured: 20,
///     thrown_out: 1,
///     commit: None,
/// };
/// assert!(sweep.tokens_per_s[0] >= sweep.default_tokens_per_s[0]);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedBy {
    /// Prompts at once, of each part of the workload.
    pub n_prompts: Vec<usize>,
    /// New tokens of each.
    pub max_new_tokens: usize,
    /// New tokens a second of each part, with the profile's options.
    pub tokens_per_s: Vec<f64>,
    /// The same with the defaults.
    pub default_tokens_per_s: Vec<f64>,
    /// Sets of options that were measured.
    pub measured: usize,
    /// Of which were thrown out because they changed numbers.
    pub thrown_out: usize,
    /// Commit of the sweep's program, where it is known.
    pub commit: Option<String>,
}

/// The best options of a device and a model's shape.
///
/// ```
/// use qwen3_model::Qwen3Config;
/// use rollout_engine::{ModelShape, TunedBy, TunedChoice, TunedOptions, TunedProfile};
///
/// let shape = ModelShape::of(&Qwen3Config::qwen3_4b(), false);
/// let mut options = TunedOptions::default();
/// options.page_size = Some(128);
/// let by = TunedBy {
///     n_prompts: vec![64],
///     max_new_tokens: 512,
///     tokens_per_s: vec![15_000.0],
///     default_tokens_per_s: vec![14_500.0],
///     measured: 20,
///     thrown_out: 0,
///     commit: None,
/// };
/// let profile = TunedProfile::new("a GPU".into(), shape.clone(), options, by);
/// assert_eq!(profile.options.page_size, Some(128));
/// assert_eq!(TunedProfile::find(&TunedChoice::Off, "a GPU", &shape)?, None);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedProfile {
    /// Form of the file.
    pub version: u32,
    /// The device, as its runner names it, without its ordinal.
    pub device: String,
    /// The model's shape.
    pub model: ModelShape,
    /// What was best.
    pub options: TunedOptions,
    /// How that was found.
    pub by: TunedBy,
}

impl TunedProfile {
    /// A profile of this version's form.
    pub fn new(device: String, model: ModelShape, options: TunedOptions, by: TunedBy) -> Self {
        Self {
            version: VERSION,
            device,
            model,
            options,
            by,
        }
    }

    /// The profile for a device and a model's shape.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a file that was named and cannot be used. Panics: none.
    pub fn find(choice: &TunedChoice, device: &str, model: &ModelShape) -> Result<Option<Self>, Error> {
        match choice {
            TunedChoice::Off => Ok(None),
            TunedChoice::File(path) => {
                let refuse = |advice: String| Error::InvalidSetting {
                    setting: "tuned_profile",
                    value: path.display().to_string(),
                    advice,
                };
                let profile = Self::read(path).map_err(refuse)?;
                match profile.is_for(device, model) {
                    true => Ok(Some(profile)),
                    false => Err(refuse(format!(
                        "it is for {} on {}, not for {} on {device}",
                        profile.model.name(),
                        profile.device,
                        model.name()
                    ))),
                }
            }
            TunedChoice::Usual => {
                if std::env::var_os(PROFILES_VARIABLE).is_some_and(|value| value == *"off") {
                    return Ok(None);
                }
                let kept = folder().map(|folder| folder.join(file_name(device, model)));
                let kept = kept
                    .filter(|path| path.exists())
                    .and_then(|path| match Self::read(&path) {
                        Ok(profile) => Some(profile),
                        Err(error) => {
                            tracing::warn!(path = %path.display(), %error, "a tuned profile is passed over");
                            None
                        }
                    });
                let built_in = BUILT_IN.iter().filter_map(|text| serde_json::from_str(text).ok());
                Ok(kept
                    .into_iter()
                    .chain(built_in)
                    .find(|profile| profile.is_for(device, model)))
            }
        }
    }

    fn is_for(&self, device: &str, model: &ModelShape) -> bool {
        self.device == device && self.model == *model
    }

    fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        let profile: Self = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        match profile.version {
            VERSION => Ok(profile),
            other => Err(format!("its form has version {other}, not {VERSION}")),
        }
    }

    /// Writes it where later runs look for it, or into `path`. Returns where.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if there is no such place; [`Error::Io`] names the file. Panics: none.
    pub fn write(&self, path: Option<&Path>) -> Result<PathBuf, Error> {
        let usual = || folder().map(|folder| folder.join(file_name(&self.device, &self.model)));
        let Some(path) = path.map(Path::to_path_buf).or_else(usual) else {
            return Err(Error::InvalidSetting {
                setting: "profile",
                value: "none".into(),
                advice: format!(
                    "there is no home folder to keep it in: name a file, or set {PROFILES_VARIABLE}"
                ),
            });
        };
        let io = |source| Error::Io {
            path: path.clone(),
            source,
        };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(io)?;
        }
        let text = serde_json::to_string_pretty(self).map_err(|error| io(error.into()))?;
        // A reader sees a whole file or none.
        let unfinished = path.with_extension("unfinished");
        std::fs::write(&unfinished, text + "\n").map_err(io)?;
        std::fs::rename(&unfinished, &path).map_err(io)?;
        Ok(path)
    }

    /// Fills in what the user left open.
    pub(crate) fn apply(&self, pool: &mut PoolSettings, kernels: &mut KernelOptions) {
        pool.page_size = pool.page_size.or(self.options.page_size);
        pool.max_prefill_tokens = pool.max_prefill_tokens.or(self.options.max_prefill_tokens);
        *kernels = kernels.or(self.options.kernels);
    }
}

/// The CPU, as profiles name it.
pub(crate) fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("cpu", |(_, model)| model);
    format!("{model}, {} threads", rayon::current_num_threads())
}

/// A GPU, as profiles name it.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_name(info: &cuda_graphs::DeviceInfo) -> String {
    let (major, minor) = info.compute_capability;
    format!(
        "{}, compute capability {major}.{minor}, {} multiprocessors",
        info.name, info.multiprocessors
    )
}

fn folder() -> Option<PathBuf> {
    resolve(&|name| std::env::var_os(name))
}

fn resolve(var: &dyn Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    let var = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match var(PROFILES_VARIABLE) {
        Some(folder) if folder == Path::new("off") => None,
        Some(folder) => Some(folder),
        None => var("XDG_CONFIG_HOME")
            // The convention: a relative path is to be ignored.
            .filter(|path| path.is_absolute())
            .or_else(|| var("HOME").map(|home| home.join(".config")))
            .map(|config| config.join("rollout/tuned")),
    }
}

fn file_name(device: &str, model: &ModelShape) -> String {
    let device: String = device
        .chars()
        .map(|c| match c {
            c if c.is_ascii_alphanumeric() || c == '.' => c.to_ascii_lowercase(),
            _ => '-',
        })
        .collect();
    format!("{device}-{}.json", model.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> TunedProfile {
        let options = "{\"page_size\": 128, \"kernels\": {\"decode\": {\"split_kv\": 256}}}";
        TunedProfile::new(
            "a GPU".into(),
            ModelShape::of(&Qwen3Config::qwen3_4b(), false),
            serde_json::from_str(options).unwrap(),
            TunedBy {
                n_prompts: vec![1, 64],
                max_new_tokens: 512,
                tokens_per_s: vec![400.0, 15_000.0],
                default_tokens_per_s: vec![390.0, 14_000.0],
                measured: 20,
                thrown_out: 1,
                commit: None,
            },
        )
    }

    #[test]
    fn a_profile_is_written_whole_and_found_for_its_device_and_shape_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new folder/profile.json");
        let of = profile();
        assert_eq!(of.write(Some(&path)).unwrap(), path);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let file = TunedChoice::File(path.clone());
        assert_eq!(
            TunedProfile::find(&file, "a GPU", &of.model).unwrap(),
            Some(of.clone())
        );
        let quantized = ModelShape {
            quantized: true,
            ..of.model.clone()
        };
        for (device, model) in [("another GPU", &of.model), ("a GPU", &quantized)] {
            let error = TunedProfile::find(&file, device, model).unwrap_err().to_string();
            assert!(error.contains("a GPU") && error.contains("36x2560"), "{error}");
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for (from, to, word) in [
            ("\"version\": 1", "\"version\": 7", "version 7"),
            ("\"split_kv\"", "\"split\"", "split"),
        ] {
            std::fs::write(&path, text.replace(from, to)).unwrap();
            let error = TunedProfile::find(&file, "a GPU", &of.model)
                .unwrap_err()
                .to_string();
            assert!(error.contains(word), "{word}: {error}");
        }
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        assert!(
            TunedProfile::find(&file, "a GPU", &of.model).is_err(),
            "cut short"
        );
    }

    #[test]
    fn what_the_user_sets_comes_first() {
        let mut pool = PoolSettings {
            page_size: Some(16),
            ..PoolSettings::default()
        };
        let mut kernels: KernelOptions = "{\"decode\": {\"warps\": 2}}".parse().unwrap();
        profile().apply(&mut pool, &mut kernels);
        assert_eq!(pool.page_size, Some(16));
        assert_eq!(
            (kernels.decode.warps, kernels.decode.split_kv),
            (Some(2), Some(256))
        );
    }

    #[test]
    fn the_folder_follows_the_conventions() {
        let with = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, String)> =
                vars.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
            resolve(&move |name| {
                let found = vars.iter().find(|(var, _)| var == name);
                found.map(|(_, value)| value.into())
            })
        };
        let home = ("HOME", "/home/me");
        assert_eq!(
            with(&[home]).unwrap(),
            Path::new("/home/me/.config/rollout/tuned")
        );
        assert_eq!(
            with(&[home, ("XDG_CONFIG_HOME", "/c")]).unwrap(),
            Path::new("/c/rollout/tuned")
        );
        assert_eq!(with(&[home, ("XDG_CONFIG_HOME", "c")]), with(&[home]));
        assert_eq!(
            with(&[home, (PROFILES_VARIABLE, "here")]).unwrap(),
            Path::new("here")
        );
        assert_eq!(with(&[home, (PROFILES_VARIABLE, "off")]), None);
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn built_in_profiles_can_be_read() {
        for text in BUILT_IN {
            let profile: TunedProfile = serde_json::from_str(text).unwrap();
            assert_eq!(profile.version, VERSION);
            assert!(profile.by.tokens_per_s.iter().all(|rate| *rate > 0.0));
        }
    }

    #[test]
    fn files_are_named_by_device_and_shape() {
        let of = profile();
        let name = file_name("NVIDIA H200, compute capability 9.0", &of.model);
        assert_eq!(
            name,
            "nvidia-h200--compute-capability-9.0-36x2560-9728-32h8kv128-v151936.json"
        );
    }
}
