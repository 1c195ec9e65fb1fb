//! Configurations and weights that were changed after they were read, and values that are no weights.

use crate::common::folder::{Folder, RawTensor};
use qwen3_model::{CpuBackend, Error, LoadOptions, Qwen3Config, WeightMatrix, Weights, random_adapter};
use safetensors::Dtype;

/// Fields of a configuration are public, and so are parts of the weights.
#[test]
fn shapes_that_do_not_fit_are_refused_when_a_backend_is_made() {
    let dir = tempfile::tempdir().unwrap();
    Folder::new().write(dir.path());
    let config = Qwen3Config::from_dir(dir.path()).unwrap();
    let weights = Weights::open(dir.path(), &config).unwrap();
    let refused = |config: &Qwen3Config, weights: &Weights, word: &str| {
        let options = LoadOptions::default();
        let error = CpuBackend::new(config.clone(), weights.clone(), &options).err();
        let error = error.expect("was made").to_string();
        assert!(error.contains(word), "{word}: {error}");
    };
    type Set = fn(&mut Qwen3Config, usize);
    let fields: [(&str, Set); 8] = [
        ("vocab_size", |c, n| c.vocab_size = n),
        ("hidden_size", |c, n| c.hidden_size = n),
        ("intermediate_size", |c, n| c.intermediate_size = n),
        ("n_layers", |c, n| c.n_layers = n),
        ("n_heads", |c, n| c.n_heads = n),
        ("n_kv_heads", |c, n| c.n_kv_heads = n),
        ("head_dim", |c, n| c.head_dim = n),
        ("max_position_embeddings", |c, n| c.max_position_embeddings = n),
    ];
    for (field, set) in fields {
        for absurd in [0, usize::MAX] {
            let mut config = config.clone();
            set(&mut config, absurd);
            refused(&config, &weights, field);
        }
        if field != "max_position_embeddings" {
            for other in [2, 4, 6, 34] {
                let mut config = config.clone();
                set(&mut config, other);
                if config.n_heads.is_multiple_of(config.n_kv_heads)
                    && config != Qwen3Config::from_dir(dir.path()).unwrap()
                {
                    refused(&config, &weights, "the configuration asks for");
                }
            }
        }
    }
    for theta in [0.0, f64::NAN, 1e-300] {
        let mut config = config.clone();
        config.rope.theta = theta;
        refused(&config, &weights, "`rope`");
    }
    let with = |change: &dyn Fn(&mut Weights)| {
        let mut weights = weights.clone();
        change(&mut weights);
        weights
    };
    let short = with(&|w| w.norm.truncate(1));
    refused(&config, &short, "`model.norm.weight` has 1");
    let short = with(&|w| w.layers[1].k_norm.truncate(1));
    refused(&config, &short, "`model.layers.1.self_attn.k_norm.weight` has 1");
    let transposed = with(&|w| {
        let (rows, cols) = (w.embed_tokens.cols(), w.embed_tokens.rows());
        let data = w.embed_tokens.to_bf16().into_owned();
        w.embed_tokens = WeightMatrix::from_vec("embedding", rows, cols, data).unwrap();
    });
    refused(&config, &transposed, "`embedding` has");
    let longer = with(&|w| w.layers.push(w.layers[0].clone()));
    refused(&config, &longer, "3 layers");
}

#[test]
fn values_that_no_bf16_can_hold_are_named() {
    let load = |name: &str, dtype: Dtype, at: usize, bytes: &[u8]| {
        let mut folder = Folder::new();
        let tensor = folder.tensors.get_mut(name).unwrap();
        *tensor = RawTensor::new(dtype, &tensor.shape, 1);
        tensor.bytes[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        let dir = tempfile::tempdir().unwrap();
        folder.write(dir.path());
        Weights::open(dir.path(), &Qwen3Config::from_dir(dir.path()).unwrap())
    };
    let matrix = "model.layers.1.mlp.up_proj.weight";
    for name in [
        matrix,
        "model.layers.0.self_attn.k_norm.weight",
        "model.norm.weight",
    ] {
        for (dtype, value) in [
            (Dtype::F32, &f32::NAN.to_le_bytes()[..]),
            (Dtype::F32, &f32::INFINITY.to_le_bytes()),
            (Dtype::F16, &0xfc00u16.to_le_bytes()),
        ] {
            let error = load(name, dtype, 5, value).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("element 5"), "{error}");
        }
    }
    // The greatest f32 rounds to an infinity, the greatest bf16 does not.
    let error = load(matrix, Dtype::F32, 5, &f32::MAX.to_le_bytes()).unwrap_err();
    assert!(error.to_string().contains(matrix), "{error}");
    load(matrix, Dtype::F32, 5, &3.38e38f32.to_le_bytes()).unwrap();
}

#[test]
fn random_adapters_of_absurd_sizes_are_refused() {
    let config = Qwen3Config::qwen3_0_6b();
    for rank in [usize::MAX, 1 << 40, (1 << 16) + 1] {
        let error = random_adapter(&config, rank, 1).unwrap_err().to_string();
        assert!(
            error.contains("`rank`") && error.contains(&rank.to_string()),
            "{error}"
        );
    }
    assert!(
        random_adapter(&config, 0, 1)
            .unwrap_err()
            .to_string()
            .contains("`r`")
    );
    let mut config = config;
    config.hidden_size = usize::MAX;
    let error = random_adapter(&config, 1, 1).unwrap_err();
    assert!(
        matches!(&error, Error::Field { field, .. } if field == "hidden_size"),
        "{error}"
    );
}
