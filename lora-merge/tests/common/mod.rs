//! Shared by the integration tests: the bundled model's modules, random adapters, a dumb oracle.
#![allow(dead_code, reason = "each test file uses a part of it")]

use half::bf16;
use lora_merge::{
    ActiveAdapter, Adapter, AdapterConfig, LowRankTerm, ModuleSpec, ModuleUpdate, OwnedWeights, TensorSlice,
    TensorValues, bf16_from_f64,
};
use std::path::PathBuf;

pub(crate) fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

pub(crate) fn fixture(path: &str) -> PathBuf {
    repository("fixtures").join(path)
}

pub(crate) fn model_file() -> PathBuf {
    repository("rollout-engine/models/tiny-qwen3-math/model.safetensors")
}

/// The projections of the bundled model, in the order of the layers.
pub(crate) fn tiny_specs() -> Vec<ModuleSpec> {
    let mut specs = Vec::new();
    for layer in 0..4 {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        specs.push(ModuleSpec::linear(name("self_attn.q_proj"), 1024, 256));
        specs.push(ModuleSpec::linear(name("self_attn.k_proj"), 256, 256));
        specs.push(ModuleSpec::linear(name("self_attn.v_proj"), 256, 256));
        specs.push(ModuleSpec::linear(name("self_attn.o_proj"), 256, 1024));
        specs.push(ModuleSpec::linear(name("mlp.gate_proj"), 640, 256));
        specs.push(ModuleSpec::linear(name("mlp.up_proj"), 640, 256));
        specs.push(ModuleSpec::linear(name("mlp.down_proj"), 256, 640));
    }
    specs
}

/// The bundled model's weights for `specs`, which may also name `lm_head` (tied to the embedding).
pub(crate) fn tiny_weights(specs: &[ModuleSpec]) -> OwnedWeights {
    let bytes = std::fs::read(model_file()).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weight = |spec: &ModuleSpec| {
        let name = if spec.name == "lm_head" {
            "model.embed_tokens"
        } else {
            spec.name.as_str()
        };
        let view = file.tensor(&format!("{name}.weight")).unwrap();
        assert_eq!(view.shape(), [spec.out_features, spec.in_features]);
        view.data()
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]))
            .collect::<Vec<_>>()
    };
    OwnedWeights::new(specs.iter().map(weight))
}

pub(crate) fn adapter(name: &str) -> ActiveAdapter {
    ActiveAdapter::new(Adapter::load(fixture("adapters").join(name)).unwrap())
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn f32s(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| scale * self.unit()).collect()
    }

    pub(crate) fn bf16s(&mut self, n: usize, scale: f32) -> Vec<bf16> {
        (0..n).map(|_| bf16::from_f32(scale * self.unit())).collect()
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// An adapter with random factors on every module of `specs` that `config` selects by suffix.
pub(crate) fn random_adapter(
    config: &AdapterConfig,
    specs: &[ModuleSpec],
    targets: &[&str],
    seed: u64,
) -> Adapter {
    let mut random = Random(seed);
    let mut owned: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for spec in specs {
        if !targets.iter().any(|t| spec.name.ends_with(t)) {
            continue;
        }
        let mut add = |part: &str, shape: Vec<usize>, scale: f32, offset: f32| {
            let values = random
                .f32s(shape.iter().product(), scale)
                .iter()
                .map(|v| v + offset)
                .collect();
            owned.push((format!("base_model.model.{}.{part}", spec.name), shape, values));
        };
        add("lora_A.weight", vec![config.r, spec.in_features], 0.5, 0.0);
        add("lora_B.weight", vec![spec.out_features, config.r], 0.1, 0.0);
        if config.use_dora {
            add("lora_magnitude_vector", vec![spec.out_features], 0.2, 1.0);
        }
        if config.lora_bias {
            add("lora_B.bias", vec![spec.out_features], 0.3, 0.0);
        }
    }
    let slices: Vec<TensorSlice<'_>> = owned
        .iter()
        .map(|(name, shape, values)| TensorSlice {
            name,
            shape,
            values: TensorValues::F32(values),
        })
        .collect();
    Adapter::from_tensors(config.clone(), &slices).unwrap()
}

/// Every element on its own, in f64, straight from the formula.
pub(crate) fn oracle(w0: &[bf16], update: &ModuleUpdate) -> Vec<f64> {
    let (rows, columns) = update.shape();
    let delta = |t: &LowRankTerm, o: usize, j: usize| -> f64 {
        t.scaling
            * (0..t.r)
                .map(|k| f64::from(t.left[o * t.r + k]) * f64::from(t.right[k * columns + j]))
                .sum::<f64>()
    };
    let base = |o: usize, j: usize| f64::from(w0[o * columns + j].to_f32());
    let mut out = vec![0.0; rows * columns];
    for o in 0..rows {
        let factors: Vec<Option<f64>> = update
            .terms()
            .iter()
            .map(|t| {
                let norm = (0..columns)
                    .map(|j| (base(o, j) + delta(t, o, j)).powi(2))
                    .sum::<f64>()
                    .sqrt();
                t.magnitude.as_ref().map(|m| f64::from(m[o]) / norm)
            })
            .collect();
        // 1 + Σ (c − 1), without adding and taking away a 1 that may be larger than all the rest.
        let gain = match factors.iter().flatten().count() {
            0 => 1.0,
            n => factors.iter().flatten().sum::<f64>() - (n - 1) as f64,
        };
        for j in 0..columns {
            out[o * columns + j] = gain * base(o, j);
            for (t, c) in update.terms().iter().zip(&factors) {
                out[o * columns + j] += c.unwrap_or(1.0) * delta(t, o, j);
            }
        }
    }
    out
}

/// Whether `got` is the correctly rounded `exact`, or its neighbour where `exact` lies within `width` of a tie, in
/// units of the distance between two bf16 values.
pub(crate) fn rounded(got: bf16, exact: f64, width: f64) -> bool {
    let right = bf16_from_f64(exact);
    if got == right {
        return true;
    }
    let middle = (got.to_f64() + right.to_f64()) / 2.0;
    let spacing = (got.to_f64() - right.to_f64()).abs();
    let adjacent = got.to_bits().abs_diff(right.to_bits()) == 1;
    adjacent && (exact - middle).abs() <= width * spacing
}
