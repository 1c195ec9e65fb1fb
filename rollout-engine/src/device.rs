//! Which device runs the model: the only place that knows all of them.

use std::path::Path;
use std::str::FromStr;

use paged_kv::{KvDtype, KvLayout};
use qwen3_model::{Backend, CpuBackend, KernelOptions, LoadOptions, Model, Qwen3Config, Weights};

use crate::Error;
use crate::builder::RunnerSettings;
use crate::model_runner::ModelRunner;
use crate::pool::{PoolLimits, PoolSettings};
use crate::runner::{Runner, RunnerMemory};
use crate::tuned::{self, ModelShape, TunedProfile};

/// The device that a user asks for: `auto`, `cpu`, `cuda` (the first GPU) or `cuda:N`.
///
/// ```
/// use rollout_engine::DeviceChoice;
///
/// assert_eq!("cuda:1".parse::<DeviceChoice>()?, DeviceChoice::Cuda(1));
/// assert_eq!(DeviceChoice::default().to_string(), "auto");
/// assert!("gpu".parse::<DeviceChoice>().is_err());
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first NVIDIA GPU if it can be used, else the CPU.
    #[default]
    Auto,
    /// The CPU, all cores.
    Cpu,
    /// An NVIDIA GPU, by its ordinal.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || Error::InvalidSetting {
            setting: "device",
            value: text.to_string(),
            advice: "use auto, cpu or cuda:N, such as cuda:0".into(),
        };
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").ok_or_else(invalid)?;
                ordinal.parse().map(Self::Cuda).map_err(|_| invalid())
            }
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Cpu => write!(f, "cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A runner that is ready, and what the user should be told about how it was chosen.
pub(crate) struct OpenedDevice {
    pub(crate) runner: Box<dyn Runner + Send>,
    /// One line, if `auto` could not use a GPU.
    pub(crate) notice: Option<String>,
    /// Whether weights are in 4 bits.
    pub(crate) quantized: bool,
}

/// A runner, and whether its weights are in 4 bits.
type Opened = (Box<dyn Runner + Send>, bool);

fn open_weights(model_dir: &Path, config: &Qwen3Config, settings: &RunnerSettings) -> Result<Weights, Error> {
    let weights = Weights::open(model_dir, config)?;
    Ok(match settings.dequantize {
        true => weights.dequantized(),
        false => weights,
    })
}

/// Loads the model of a folder onto the chosen device.
pub(crate) fn open(
    choice: DeviceChoice,
    model_dir: &Path,
    config: &Qwen3Config,
    settings: &RunnerSettings,
) -> Result<OpenedDevice, Error> {
    let opened = |(runner, quantized): Opened| OpenedDevice {
        runner,
        notice: None,
        quantized,
    };
    match choice {
        DeviceChoice::Cpu => open_cpu(model_dir, config, settings).map(opened),
        DeviceChoice::Cuda(ordinal) => open_cuda(ordinal, model_dir, config, settings).map(opened),
        DeviceChoice::Auto => match open_cuda(0, model_dir, config, settings) {
            Ok(runner) => Ok(opened(runner)),
            Err(Error::DeviceUnavailable { reason, .. }) => Ok(OpenedDevice {
                notice: Some(format!("using the CPU: {reason}")),
                ..opened(open_cpu(model_dir, config, settings)?)
            }),
            Err(other) => Err(other),
        },
    }
}

/// Sizes and kernel options as they are set, and those of the profile for this device and model where they are not.
fn with_profile(
    settings: &RunnerSettings,
    device: &str,
    model: &ModelShape,
) -> Result<(PoolSettings, KernelOptions), Error> {
    let (mut pool, mut kernels) = (settings.pool, settings.kernels);
    if let Some(profile) = TunedProfile::find(&settings.tuned, device, model)? {
        profile.apply(&mut pool, &mut kernels);
    }
    Ok((pool, kernels))
}

fn open_cpu(model_dir: &Path, config: &Qwen3Config, settings: &RunnerSettings) -> Result<Opened, Error> {
    let kv_dtype = settings.kv_dtype.unwrap_or(KvDtype::F32);
    let weights = open_weights(model_dir, config, settings)?;
    let quantized = weights.is_quantized();
    // Kernel options are of GPUs alone.
    let (pool, _) = with_profile(settings, &tuned::cpu_name(), &ModelShape::of(config, quantized))?;
    let layout = KvLayout {
        n_layers: config.n_layers,
        kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        n_pages: 2,
        page_size: 1,
        dtype: kv_dtype,
    };
    let shape = pool.resolve(config, &PoolLimits::of_this_machine(layout.bytes_per_token()?))?;
    let mut options = LoadOptions::default();
    options.kv_dtype = kv_dtype;
    options.n_pages = shape.n_pages;
    options.page_size = shape.page_size;
    options.max_tokens = shape.max_prefill_tokens + shape.max_batch_size;
    let backend = CpuBackend::new(config.clone(), weights, &options)?;
    let memory = RunnerMemory {
        weight_bytes: backend.weights().bytes(),
        adapter_bytes: 0,
        kv_bytes: backend.kv_layout().bytes()?,
    };
    let device = format!("cpu ({} threads)", rayon::current_num_threads());
    let runner = ModelRunner::new(Model::new(backend), shape, device, memory);
    Ok((Box::new(runner), quantized))
}

#[cfg(feature = "cuda")]
fn open_cuda(
    ordinal: usize,
    model_dir: &Path,
    config: &Qwen3Config,
    settings: &RunnerSettings,
) -> Result<Opened, Error> {
    use crate::cuda_runner::CudaRunner;
    use qwen3_model::cuda::WeightSource;

    // Before the weights are read: without a GPU nothing of them is needed here.
    let info = CudaRunner::device_info(ordinal)?;
    if let Some(dtype @ KvDtype::F32) = settings.kv_dtype {
        return Err(Error::InvalidSetting {
            setting: "kv_dtype",
            value: dtype.to_string(),
            advice: "the cache on a GPU is bf16".into(),
        });
    }
    let weights = open_weights(model_dir, config, settings)?;
    let model = ModelShape::of(config, weights.is_quantized());
    let (pool, kernels) = with_profile(settings, &tuned::gpu_name(&info), &model)?;
    let cuda = cuda_settings(ordinal, settings, kernels);
    let runner = CudaRunner::open(config, WeightSource::Given(&weights), &pool, &cuda)?;
    Ok((Box::new(runner), weights.is_quantized()))
}

#[cfg(feature = "cuda")]
fn cuda_settings(
    ordinal: usize,
    settings: &RunnerSettings,
    kernels: KernelOptions,
) -> crate::cuda_runner::CudaSettings {
    crate::cuda_runner::CudaSettings {
        ordinal,
        capture: !settings.eager,
        pristine: settings.pristine,
        kernels,
        batch_invariant: settings.batch_invariant,
        ..Default::default()
    }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(
    ordinal: usize,
    _model_dir: &Path,
    _config: &Qwen3Config,
    _settings: &RunnerSettings,
) -> Result<Opened, Error> {
    Err(Error::DeviceUnavailable {
        device: DeviceChoice::Cuda(ordinal).to_string(),
        reason: "this build has no CUDA support".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuned::{TunedBy, TunedChoice};

    /// A file with the profile of a device and the bundled model, whose options are `options`.
    fn profile(path: &Path, device: &str, config: &Qwen3Config, options: &str) -> TunedChoice {
        let by = TunedBy {
            n_prompts: vec![1],
            max_new_tokens: 1,
            tokens_per_s: vec![2.0],
            default_tokens_per_s: vec![1.0],
            measured: 2,
            thrown_out: 0,
            commit: None,
        };
        let options = serde_json::from_str(options).unwrap();
        let profile = TunedProfile::new(device.into(), ModelShape::of(config, false), options, by);
        TunedChoice::File(profile.write(Some(path)).unwrap())
    }

    #[test]
    fn the_options_of_a_profile_reach_the_runner() {
        let dir = crate::bundled::model_dir().unwrap();
        let config = Qwen3Config::from_dir(&dir).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let options = "{\"page_size\": 32, \"max_prefill_tokens\": 96}";
        let path = folder.path().join("cpu.json");
        let mut settings = RunnerSettings {
            tuned: profile(&path, &tuned::cpu_name(), &config, options),
            ..RunnerSettings::default()
        };
        settings.pool.max_seq_length = Some(128);
        let sizes = |settings: &RunnerSettings| {
            let shape = open(DeviceChoice::Cpu, &dir, &config, settings)
                .unwrap()
                .runner
                .shape();
            (shape.page_size, shape.max_prefill_tokens)
        };
        assert_eq!(sizes(&settings), (32, 96));
        settings.pool.max_prefill_tokens = Some(50);
        assert_eq!(sizes(&settings), (32, 50), "what is set comes first");
        settings.tuned = TunedChoice::Off;
        assert_eq!(sizes(&settings), (64, 50));
    }

    #[test]
    #[cfg(feature = "cuda")]
    fn the_options_of_a_profile_reach_the_backend_of_a_gpu() {
        let config = Qwen3Config::from_dir(&crate::bundled::model_dir().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let kernels = "{\"decode\": {\"warps\": 8, \"stages\": 2, \"split_kv\": 1024}, \"prefill\": {\"kernel\": \"mma\"},
            \"matrix\": {\"layer_kernel_rows\": 8}}";
        let options = format!("{{\"page_size\": 128, \"max_prefill_tokens\": 2048, \"kernels\": {kernels}}}");
        let mut settings = RunnerSettings {
            tuned: profile(&folder.path().join("gpu.json"), "a GPU", &config, &options),
            ..RunnerSettings::default()
        };
        let backend = |settings: &RunnerSettings| {
            let (pool, kernels) = with_profile(settings, "a GPU", &ModelShape::of(&config, false)).unwrap();
            let shape = pool.resolve(&config, &PoolLimits::of_this_machine(1)).unwrap();
            crate::cuda_runner::backend_options(&shape, &cuda_settings(0, settings, kernels))
        };
        let options = backend(&settings);
        assert_eq!(options.page_size, 128);
        assert_eq!(options.max_tokens, 2048 + options.max_batch_size);
        assert_eq!(options.kernels, kernels.parse().unwrap());
        settings.kernels = "{\"decode\": {\"warps\": 4}}".parse().unwrap();
        let decode = backend(&settings).kernels.decode;
        assert_eq!((decode.warps, decode.split_kv), (Some(4), Some(1024)));
    }
}
