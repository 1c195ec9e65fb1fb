//! What the GPU tests share: a device, random numbers, and the measure of an error.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several test binaries, each of which uses its own part"
)]

pub mod decode_layers;
pub mod products;
mod profile;

use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
use half::bf16;
use lora_merge::{ActiveAdapter, Adapter};
use qwen3_model::cuda::CudaOptions;
use qwen3_model::launch::Kernels;
use qwen3_model::{Qwen3Config, Weights};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Byte whose repetition is a NaN in every float type.
pub const POISON: u8 = 0xff;

pub struct Gpu {
    pub device: Device,
    pub stream: Stream,
    pub compiler: Compiler,
}

impl Gpu {
    pub fn open() -> Self {
        let device = Device::open(0).expect("an NVIDIA GPU");
        let stream = Stream::new(&device).expect("a stream");
        Self {
            device,
            stream,
            compiler: Compiler::new().expect("NVRTC"),
        }
    }

    pub fn kernels(&self, hidden: usize, head_dim: usize) -> Kernels {
        Kernels::load(&self.compiler, &self.device, &config(hidden, head_dim, 4, 2)).expect("kernels")
    }

    pub fn put<T: bytemuck::Pod>(&self, values: &[T]) -> DeviceBuffer<T> {
        DeviceBuffer::from_slice(&self.stream, values).expect("a buffer")
    }

    pub fn poisoned<T: bytemuck::Pod>(&self, len: usize) -> DeviceBuffer<T> {
        DeviceBuffer::filled_with_bytes(&self.device, len, POISON).expect("a buffer")
    }

    pub fn get<T: bytemuck::Pod>(&self, buffer: &DeviceBuffer<T>) -> Vec<T> {
        self.stream.download(buffer).expect("a download")
    }
}

/// These options, with pages of the size of the tuned profile that the tests run under, if there is one.
pub fn tuned(mut options: CudaOptions) -> CudaOptions {
    (options.n_pages, options.page_size) = profile::pages(options.n_pages, options.page_size);
    options
}

/// A small model of these widths.
pub fn config(hidden: usize, head_dim: usize, heads: usize, kv_heads: usize) -> Qwen3Config {
    let json = format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": {hidden},
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": {heads},
            "num_key_value_heads": {kv_heads}, "head_dim": {head_dim}, "vocab_size": 64, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "max_position_embeddings": 4096, "tie_word_embeddings": true}}"#
    );
    Qwen3Config::from_json(json.as_bytes()).expect("a valid config")
}

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Roughly normal, never zero on the whole.
pub fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum::<f32>() * 0.707
}

pub fn normals(rng: &mut ChaCha8Rng, n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|_| scale * normal(rng)).collect()
}

pub fn bf16s(rng: &mut ChaCha8Rng, n: usize, scale: f32) -> Vec<bf16> {
    (0..n).map(|_| bf16::from_f32(scale * normal(rng))).collect()
}

/// Rounds as a bf16 formula does between its steps.
pub fn round(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

/// The rule for every kernel: its distance from the f64 reference is at most twice that of the plain bf16 formula.
pub fn assert_twice(what: &str, kernel: &[bf16], plain: &[f64], exact: &[f64]) {
    assert_eq!(kernel.len(), exact.len(), "{what}");
    assert!(
        kernel.iter().all(|x| x.is_finite()),
        "{what}: an element was not written"
    );
    let norm = |errors: &mut dyn Iterator<Item = f64>| errors.map(|e| e * e).sum::<f64>().sqrt();
    let ours = norm(&mut kernel.iter().zip(exact).map(|(k, e)| k.to_f64() - e));
    let theirs = norm(&mut plain.iter().zip(exact).map(|(p, e)| p - e));
    let size = norm(&mut exact.iter().copied());
    assert!(
        ours <= 2.0 * theirs + 1e-12 * size,
        "{what}: error {ours:e}, the plain formula has {theirs:e}, of {size:e}"
    );
}

/// The configuration and weights of the model in a folder of the repository.
pub fn model(folder: &str) -> (Qwen3Config, Weights) {
    let dir = repository().join(folder);
    let config = Qwen3Config::from_dir(&dir).expect("a configuration");
    let weights = Weights::open(&dir, &config).expect("weights");
    (config, weights)
}

/// The bundled model.
pub fn tiny() -> (Qwen3Config, Weights) {
    model("rollout-engine/models/tiny-qwen3-math")
}

/// An adapter of the fixtures, several with `+` between them, or none.
pub fn active(names: &str) -> Vec<ActiveAdapter> {
    let load = |name| {
        let path = repository().join("fixtures/adapters").join(name);
        ActiveAdapter::new(Adapter::load(path).expect("an adapter"))
    };
    let names = names.split('+').filter(|name| !name.is_empty());
    names.map(load).collect()
}

pub fn mean_difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs()));
    differences.sum::<f64>() / a.len() as f64
}

/// The repository: where it was built, or the present folder for test binaries that were carried to another machine.
pub fn repository() -> std::path::PathBuf {
    let built = std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let places = [built, ".".into(), "..".into()];
    let found = places
        .into_iter()
        .find(|place| place.join("fixtures/golden").is_dir());
    found.expect("run this in the repository, which holds fixtures/golden")
}
