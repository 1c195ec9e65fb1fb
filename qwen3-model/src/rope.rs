//! Rotary position embedding: its parameters and the numbers that follow from them.
//!
//! `default` and `yarn` are computed as transformers computes them: the inverse frequencies and
//! the angles in f32, so that long positions round the same way. There is no table of positions:
//! cosines and sines are computed for the positions of a step, whatever their size.

use crate::json::Fields;
use crate::{Error, Result};

/// How positions are scaled beyond the trained context.
///
/// ```
/// use qwen3_model::{Qwen3Config, RopeScaling};
///
/// assert_eq!(Qwen3Config::qwen3_0_6b().rope.scaling, RopeScaling::Default);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Plain rotary embedding.
    Default,
    /// YaRN: low frequencies are interpolated, high ones kept, and cosine and sine multiplied by
    /// an attention factor.
    Yarn {
        /// Context extension factor.
        factor: f64,
        /// Positions the model was trained with.
        original_max_position_embeddings: usize,
        /// Rotations above which a frequency is kept (transformers' default: 32).
        beta_fast: f64,
        /// Rotations below which a frequency is fully interpolated (default: 1).
        beta_slow: f64,
        /// Multiplies cosine and sine.
        attention_factor: f64,
        /// Whether the correction range is rounded outwards to whole dimensions (default: true).
        truncate: bool,
    },
}

/// The rotary embedding of a model.
///
/// ```
/// use qwen3_model::{RopeConfig, RopeScaling};
///
/// let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default };
/// assert_eq!(rope.frequencies(4).inv_freq, [1.0, 0.01]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling beyond the trained context.
    pub scaling: RopeScaling,
}

/// Inverse frequencies of a model's rotary embedding.
///
/// ```
/// use qwen3_model::RopeFrequencies;
///
/// let frequencies = RopeFrequencies { inv_freq: vec![1.0, 0.5], attention_factor: 1.0 };
/// let (mut cos, mut sin) = ([0.0; 2], [0.0; 2]);
/// frequencies.cos_sin(2, &mut cos, &mut sin);
/// assert_eq!((cos[1], sin[1]), (1f32.cos(), 1f32.sin()));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFrequencies {
    /// `[head_dim / 2]`, radians per position.
    pub inv_freq: Vec<f32>,
    /// Multiplies every cosine and sine; 1 without scaling.
    pub attention_factor: f32,
}

impl RopeConfig {
    /// transformers' own default base, for configurations that state none.
    const DEFAULT_THETA: f64 = 10_000.0;

    /// Reads the transformers 5 form (`rope_parameters`) or the transformers 4 form
    /// (`rope_theta` and `rope_scaling`). A base inside and one beside must agree.
    pub(crate) fn from_fields(fields: &Fields<'_>, max_positions: usize) -> Result<Self> {
        let new = fields.object("rope_parameters")?;
        let old = fields.object("rope_scaling")?;
        if let (Some(_), Some(_)) = (&new, &old) {
            return Err(fields.error(
                "rope_scaling",
                "stands beside `rope_parameters`; keep one of them",
            ));
        }
        let name = if new.is_some() {
            "rope_parameters"
        } else {
            "rope_scaling"
        };
        let parameters = new.or(old);
        let top = fields.positive("rope_theta")?;
        // transformers 5 reads a base in either object.
        let nested = match &parameters {
            Some(parameters) => parameters.positive("rope_theta")?,
            None => None,
        };
        let theta = match (top, nested) {
            (Some(a), Some(b)) if a != b => {
                let problem = format!("is {a}, but `{name}.rope_theta` is {b}");
                return Err(fields.error("rope_theta", problem));
            }
            (a, b) => b.or(a).unwrap_or(Self::DEFAULT_THETA),
        };
        if let Some(share) = fields.positive("partial_rotary_factor")?
            && share != 1.0
        {
            return Err(fields.error(
                "partial_rotary_factor",
                format!("is {share}; Qwen3 rotates all dimensions"),
            ));
        }
        let scaling = match parameters {
            Some(parameters) => RopeScaling::from_fields(fields, &parameters, max_positions, theta)?,
            None => RopeScaling::Default,
        };
        Ok(Self { theta, scaling })
    }

    /// The inverse frequencies for heads of `head_dim` dimensions, computed in f32 in
    /// transformers' order of operations.
    ///
    /// Panics: none for a `head_dim` that a model can have, to 1024 (0 gives none).
    pub fn frequencies(&self, head_dim: usize) -> RopeFrequencies {
        let half = head_dim / 2;
        let powers = (0..half).map(|i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            self.theta.powf(f64::from(exponent)) as f32
        });
        match &self.scaling {
            RopeScaling::Default => RopeFrequencies {
                inv_freq: powers.map(|power| 1.0 / power).collect(),
                attention_factor: 1.0,
            },
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => {
                let correction = |rotations: f64| {
                    let wavelengths =
                        *original_max_position_embeddings as f64 / (rotations * std::f64::consts::TAU);
                    head_dim as f64 * wavelengths.ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (correction(*beta_fast), correction(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(head_dim as f64 - 1.0);
                if low == high {
                    high += 0.001;
                }
                let inv_freq = powers.enumerate().map(|(i, power)| {
                    let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let keep = 1.0 - ramp;
                    let interpolated = 1.0 / (*factor as f32 * power);
                    let extrapolated = 1.0 / power;
                    interpolated * (1.0 - keep) + extrapolated * keep
                });
                RopeFrequencies {
                    inv_freq: inv_freq.collect(),
                    attention_factor: *attention_factor as f32,
                }
            }
        }
    }
}

impl RopeScaling {
    fn from_fields(
        config: &Fields<'_>,
        parameters: &Fields<'_>,
        max_positions: usize,
        theta: f64,
    ) -> Result<Self> {
        for layer_type in ["full_attention", "sliding_attention"] {
            if parameters.value(layer_type).is_some() {
                return Err(parameters.error(layer_type, "parameters per layer type are not part of Qwen3"));
            }
        }
        if let Some(share) = parameters.positive("partial_rotary_factor")?
            && share != 1.0
        {
            return Err(parameters.error(
                "partial_rotary_factor",
                format!("is {share}; Qwen3 rotates all dimensions"),
            ));
        }
        let (field, rope_type) = match (parameters.string("rope_type")?, parameters.string("type")?) {
            (Some(a), Some(b)) if a != b => {
                return Err(parameters.error("type", format!("is {b:?}, but `rope_type` is {a:?}")));
            }
            (Some(a), _) => ("rope_type", a),
            (None, Some(b)) => ("type", b),
            (None, None) => ("rope_type", "default"),
        };
        match rope_type {
            "default" => Ok(Self::Default),
            "yarn" => Self::yarn(config, parameters, max_positions, theta),
            other => {
                let problem = format!("is {other:?}; `default` and `yarn` are supported");
                Err(parameters.error(field, problem))
            }
        }
    }

    fn yarn(
        config: &Fields<'_>,
        parameters: &Fields<'_>,
        max_positions: usize,
        theta: f64,
    ) -> Result<Self, Error> {
        if theta <= 1.0 {
            return Err(config.error("rope_theta", format!("is {theta}; yarn needs a base above 1")));
        }
        const MAX: usize = 1 << 30;
        let original = match config.size("original_max_position_embeddings", MAX)? {
            Some(outer) => outer,
            None => parameters
                .size("original_max_position_embeddings", MAX)?
                .unwrap_or(max_positions),
        };
        // Absent, the factor follows from the two context lengths.
        let factor = parameters
            .positive("factor")?
            .unwrap_or(max_positions as f64 / original as f64);
        if factor < 1.0 {
            return Err(parameters.error("factor", format!("is {factor}; it must be at least 1")));
        }
        let scale = |mscale: f64| {
            if factor <= 1.0 {
                1.0
            } else {
                0.1 * mscale * factor.ln() + 1.0
            }
        };
        let attention_factor = match parameters.positive("attention_factor")? {
            Some(stated) => stated,
            None => match (
                parameters.positive("mscale")?,
                parameters.positive("mscale_all_dim")?,
            ) {
                (Some(mscale), Some(all_dim)) => scale(mscale) / scale(all_dim),
                _ => scale(1.0),
            },
        };
        let beta_fast = parameters.positive("beta_fast")?.unwrap_or(32.0);
        let beta_slow = parameters.positive("beta_slow")?.unwrap_or(1.0);
        if beta_fast < beta_slow {
            let problem = format!("is {beta_fast}, below `beta_slow`, which is {beta_slow}");
            return Err(parameters.error("beta_fast", problem));
        }
        Ok(Self::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate: parameters.boolean("truncate")?.unwrap_or(true),
        })
    }
}

impl RopeFrequencies {
    /// Writes cosine and sine of every frequency at `position`, both times the attention factor.
    /// `cos` and `sin` are `[head_dim / 2]`; of unequal lengths the shortest counts.
    ///
    /// Panics: none.
    pub fn cos_sin(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((inv_freq, cos), sin) in self.inv_freq.iter().zip(cos).zip(sin) {
            // The product is rounded to f32, as transformers does, before the exact functions.
            let angle = f64::from(position as f32 * inv_freq);
            let (s, c) = angle.sin_cos();
            *cos = c as f32 * self.attention_factor;
            *sin = s as f32 * self.attention_factor;
        }
    }
}
