//! A policy of few numbers: a gain for some matrices of the model, 0 at the start.
//!
//! A LoRA adapter of full rank, `A = W` and `B = 1`, applies them as `W + gain·W`.

use std::error::Error;

use half::bf16;
use lora_merge::{Adapter, AdapterConfig, TensorSlice, TensorValues};
use qwen3_model::{Projection, Qwen3Config, Weights};
use rand::Rng;
use rollout_engine::bundled;

/// The matrices that have a gain, with what an adapter needs to apply it.
#[derive(Debug)]
pub struct Gained {
    weights: Weights,
    hidden: usize,
    /// The identity `[hidden, hidden]`.
    identity: Vec<bf16>,
    /// Module, and its layer and projection; the head has none.
    modules: Vec<(String, Option<(usize, Projection)>)>,
}

impl Gained {
    /// The last layer's two outputs and the head: what is added to the residual last, and what reads it.
    ///
    /// # Errors
    /// Those of writing and reading the bundled model's folder.
    pub fn of_bundled_model() -> Result<Self, Box<dyn Error>> {
        let folder = bundled::model_dir()?;
        let config = Qwen3Config::from_dir(&folder)?;
        let hidden = config.hidden_size;
        let last = config.n_layers - 1;
        let outputs = [Projection::O, Projection::Down];
        let outputs = outputs.map(|output| (output.module(last), Some((last, output))));
        let one = |i| bf16::from_f32(if i % (hidden + 1) == 0 { 1.0 } else { 0.0 });
        Ok(Self {
            modules: outputs.into_iter().chain([("lm_head".into(), None)]).collect(),
            weights: Weights::open(&folder, &config)?,
            identity: (0..hidden * hidden).map(one).collect(),
            hidden,
        })
    }

    /// Names of the matrices, in the order of their gains.
    pub fn modules(&self) -> impl ExactSizeIterator<Item = &str> {
        self.modules.iter().map(|(name, _)| name.as_str())
    }

    /// A direction to perturb the gains in: a draw from N(0, 1) for each.
    pub fn direction(&self, random: &mut impl Rng) -> Vec<f64> {
        let mut gaussian = || {
            let (u, v): (f64, f64) = (random.random(), random.random());
            (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        self.modules.iter().map(|_| gaussian()).collect()
    }

    /// The adapter that adds to each matrix its gain times itself.
    ///
    /// # Errors
    /// None with as many gains as matrices.
    pub fn adapter(&self, gains: &[f64]) -> Result<Adapter, lora_merge::Error> {
        let targets = self.modules.iter().map(|(name, _)| name.clone());
        let mut config = AdapterConfig::new(self.hidden, 0.0, targets.clone());
        // An adapter is scaled by alpha over rank.
        let alphas = gains.iter().map(|gain| gain * self.hidden as f64);
        config.alpha_pattern = targets.zip(alphas).collect();
        let mut names = Vec::new();
        for (name, _) in &self.modules {
            names.push([format!("{name}.lora_A.weight"), format!("{name}.lora_B.weight")]);
        }
        let mut tensors = Vec::new();
        let square = [self.hidden, self.hidden];
        let shapes = self.modules.iter().map(|(_, place)| match place {
            Some((layer, projection)) => {
                let matrix = self.weights.layers[*layer].projection(*projection);
                (matrix, [matrix.rows(), matrix.cols()])
            }
            None => {
                let head = &self.weights.lm_head;
                (head, [head.rows(), head.cols()])
            }
        });
        let shapes: Vec<_> = shapes.collect();
        for (([name_a, name_b], (matrix, shape)), (_, place)) in names.iter().zip(&shapes).zip(&self.modules)
        {
            // `W = 1·W` where the output has the rank's size, `W = W·1` for the head, whose input has.
            let (a, b) = match place {
                Some(_) => ((shape, matrix.data()), (&square, self.identity.as_slice())),
                None => ((&square, self.identity.as_slice()), (shape, matrix.data())),
            };
            for (name, (shape, values)) in [(name_a, a), (name_b, b)] {
                tensors.push(TensorSlice {
                    name,
                    shape,
                    values: TensorValues::Bf16(values),
                });
            }
        }
        Adapter::from_tensors(config, &tensors)
    }
}
