//! `adapter_config.json`: every field of PEFT's `LoraConfig` is applied exactly, known to change nothing at
//! inference, or refused by name.
//!
//! A field that this crate has never heard of is accepted only when its value is `null`, `false` or empty: such a
//! value is how PEFT saves an option that is off.

use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// Which modules an adapter targets.
///
/// ```
/// use lora_merge::{AdapterConfig, Targets};
///
/// let config = |targets: &str| {
///     AdapterConfig::from_json(&format!(r#"{{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": {targets}}}"#))
/// };
/// assert_eq!(config(r#"["q_proj"]"#)?.target_modules, Targets::List(vec!["q_proj".into()]));
/// assert_eq!(config(r#"".*_proj""#)?.target_modules, Targets::Regex(".*_proj".into()));
/// assert_eq!(config(r#""all-linear""#)?.target_modules, Targets::AllLinear);
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Targets {
    /// A module matches an entry that equals its name or is a dotted suffix of it.
    List(Vec<String>),
    /// A Python regular expression that must match the whole name.
    Regex(String),
    /// Every linear module but the output head.
    AllLinear,
}

/// Which base biases were trained with the adapter.
///
/// ```
/// use lora_merge::{AdapterConfig, BiasMode};
///
/// let json = r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "lora_only"}"#;
/// assert_eq!(AdapterConfig::from_json(json)?.bias, BiasMode::LoraOnly);
/// assert_eq!(AdapterConfig::new(8, 8.0, ["q_proj"]).bias, BiasMode::None);
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BiasMode {
    /// None: the file holds no base bias.
    #[default]
    None,
    /// All biases of the model.
    All,
    /// The biases of adapted modules.
    LoraOnly,
}

/// The fields of `adapter_config.json` that decide what a merge computes.
///
/// Read one with [`AdapterConfig::from_json`] or start from [`AdapterConfig::new`] and set fields.
///
/// ```
/// use lora_merge::AdapterConfig;
///
/// let config = AdapterConfig::new(8, 16.0, ["q_proj", "v_proj"]);
/// let read = AdapterConfig::from_json(
///     r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}"#,
/// )?;
/// assert_eq!((config.r, config.lora_alpha), (read.r, read.lora_alpha));
/// assert!(AdapterConfig::from_json(r#"{"peft_type": "IA3", "target_modules": ["q_proj"]}"#).is_err());
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdapterConfig {
    /// Rank of modules that no entry of `rank_pattern` matches.
    pub r: usize,
    /// Alpha of modules that no entry of `alpha_pattern` matches.
    pub lora_alpha: f64,
    /// Scale by alpha / √r instead of alpha / r.
    pub use_rslora: bool,
    /// Which modules are adapted.
    pub target_modules: Targets,
    /// Which modules are not, although they are targeted ([`Targets::AllLinear`] is not meaningful here).
    pub exclude_modules: Option<Targets>,
    /// Layer indices to adapt; `None` is all. Applies to list targets that match by suffix.
    pub layers_to_transform: Option<Vec<u64>>,
    /// Names (regular expressions) of the segment before the layer index.
    pub layers_pattern: Vec<String>,
    /// Rank by module-name pattern, in order: the first match counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// Alpha by module-name pattern, in order: the first match counts.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Modules whose full tensors replace the base's.
    pub modules_to_save: Vec<String>,
    /// The base stores `[in, out]`. As in PEFT, the module's kind overrides this.
    pub fan_in_fan_out: bool,
    /// Which base biases the file replaces.
    pub bias: BiasMode,
    /// B has a bias, scaled like the product.
    pub lora_bias: bool,
    /// Weight-decomposed adapter: rows are rescaled to trained magnitudes.
    pub use_dora: bool,
}

/// Fields that describe training or bookkeeping and change nothing at inference.
const IGNORED: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Fields that must be off, and why.
const REFUSED: &[(&str, &str)] = &[
    (
        "alora_invocation_tokens",
        "an activated adapter applies to some positions only, so it cannot be merged",
    ),
    ("arrow_config", "routing between adapters depends on the input"),
    ("corda_config", "this initialisation alters the base weights"),
    (
        "ensure_weight_tying",
        "tied modules are merged independently here",
    ),
    ("kasa_config", "this variant alters the base weights"),
    ("layer_replication", "it changes the number of layers"),
    ("loftq_config", "this initialisation alters the base weights"),
    ("lora_ga_config", "this initialisation alters the base weights"),
    ("megatron_config", "tensor-parallel layers are not read"),
    ("monteclora_config", "this variant samples its weights"),
    (
        "target_parameters",
        "parameters outside linear modules are not adapted",
    ),
    ("trainable_token_indices", "token embeddings are not adapted"),
    ("use_bdlora", "block-diagonal adapters are not read"),
    ("use_qalora", "this variant pools the inputs of a quantised layer"),
    ("velora_config", "this variant compresses activations"),
];

impl Default for AdapterConfig {
    /// PEFT's defaults: r 8, alpha 8, and for Qwen3 `q_proj` and `v_proj`.
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            use_rslora: false,
            target_modules: Targets::List(vec!["q_proj".into(), "v_proj".into()]),
            exclude_modules: None,
            layers_to_transform: None,
            layers_pattern: Vec::new(),
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            fan_in_fan_out: false,
            bias: BiasMode::None,
            lora_bias: false,
            use_dora: false,
        }
    }
}

impl AdapterConfig {
    /// A plain adapter of rank `r` on modules whose names end in one of `targets`. Panics: none.
    pub fn new(r: usize, lora_alpha: f64, targets: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let target_modules = Targets::List(targets.into_iter().map(Into::into).collect());
        Self {
            r,
            lora_alpha,
            target_modules,
            ..Self::default()
        }
    }

    /// Parses the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// [`Error::ConfigSyntax`], [`Error::ConfigField`], [`Error::Unsupported`], each naming the field;
    /// [`Error::Pattern`] for an expression that does not compile. Panics: none.
    pub fn from_json(text: &str) -> Result<Self> {
        if text.len() > MAX_CONFIG_BYTES {
            return Err(Error::ConfigSyntax {
                reason: format!("{} bytes are too many", text.len()),
            });
        }
        let value: Value = serde_json::from_str(text).map_err(|e| Error::ConfigSyntax {
            reason: e.to_string(),
        })?;
        let Value::Object(map) = value else {
            return Err(Error::ConfigSyntax {
                reason: "not a JSON object".into(),
            });
        };
        let config = Self::from_map(&map)?;
        config.validate()?;
        Ok(config)
    }

    fn from_map(map: &Map<String, Value>) -> Result<Self> {
        match map.get("peft_type") {
            Some(Value::String(s)) if s.eq_ignore_ascii_case("LORA") => {}
            Some(other @ Value::String(_)) => {
                return Err(unsupported("peft_type", other, "only LoRA adapters are read"));
            }
            other => {
                return Err(field(
                    "peft_type",
                    "the string \"LORA\"",
                    other.unwrap_or(&Value::Null),
                ));
            }
        }
        let mut config = Self::default();
        let mut layers_pattern_given = false;
        for (key, value) in map {
            match key.as_str() {
                "peft_type" => {}
                "r" => config.r = positive(key, value)?,
                "lora_alpha" => config.lora_alpha = number(key, value)?,
                "use_rslora" => config.use_rslora = boolean(key, value)?,
                "target_modules" => {
                    if let Some(targets) = targets(key, value)? {
                        config.target_modules = targets;
                    }
                }
                "exclude_modules" => config.exclude_modules = targets(key, value)?,
                "layers_to_transform" => config.layers_to_transform = indices(key, value)?,
                "layers_pattern" => {
                    config.layers_pattern = one_or_many(key, value)?;
                    layers_pattern_given = !value.is_null();
                }
                "rank_pattern" => config.rank_pattern = dictionary(key, value, positive)?,
                "alpha_pattern" => config.alpha_pattern = dictionary(key, value, number)?,
                "modules_to_save" => config.modules_to_save = one_or_many(key, value)?,
                "fan_in_fan_out" => config.fan_in_fan_out = boolean(key, value)?,
                "bias" => {
                    config.bias = match value.as_str() {
                        Some("none") => BiasMode::None,
                        Some("all") => BiasMode::All,
                        Some("lora_only") => BiasMode::LoraOnly,
                        _ => return Err(field(key, "\"none\", \"all\" or \"lora_only\"", value)),
                    }
                }
                "lora_bias" => config.lora_bias = boolean(key, value)?,
                "use_dora" => config.use_dora = boolean(key, value)?,
                "init_lora_weights" => init_scheme(value)?,
                ignored if IGNORED.contains(&ignored) => {}
                other => {
                    if !is_off(value) {
                        let reason = REFUSED.iter().find(|(name, _)| *name == other);
                        let reason =
                            reason.map_or("this crate does not know the field", |(_, reason)| reason);
                        return Err(unsupported(other, value, reason));
                    }
                }
            }
        }
        if matches!(config.target_modules, Targets::Regex(_) | Targets::AllLinear) {
            let all_linear = config.target_modules == Targets::AllLinear;
            if config.layers_to_transform.is_some() && !all_linear {
                return Err(unsupported(
                    "layers_to_transform",
                    &Value::Null,
                    "`target_modules` is a string",
                ));
            }
            if layers_pattern_given && !all_linear {
                return Err(unsupported(
                    "layers_pattern",
                    &Value::Null,
                    "`target_modules` is a string",
                ));
            }
        }
        if config.exclude_modules == Some(Targets::AllLinear) {
            // For exclusion PEFT has no shorthand: the text is a plain regular expression.
            config.exclude_modules = map
                .get("exclude_modules")
                .and_then(Value::as_str)
                .map(|s| Targets::Regex(s.into()));
        }
        Ok(config)
    }

    /// Checks what holds between fields, and that every pattern compiles.
    pub(crate) fn validate(&self) -> Result<()> {
        let positive = |name: &str, r: usize| {
            if r == 0 {
                Err(field(name, "a positive integer", &json!(r)))
            } else {
                Ok(())
            }
        };
        positive("r", self.r)?;
        for (_, r) in &self.rank_pattern {
            positive("rank_pattern", *r)?;
        }
        let finite = |name: &str, alpha: f64| {
            if alpha.is_finite() {
                Ok(())
            } else {
                Err(field(name, "a finite number", &json!(alpha.to_string())))
            }
        };
        finite("lora_alpha", self.lora_alpha)?;
        for (_, alpha) in &self.alpha_pattern {
            finite("alpha_pattern", *alpha)?;
        }
        if self.lora_bias && self.use_dora {
            return Err(unsupported(
                "lora_bias",
                &Value::Bool(true),
                "PEFT does not define it together with use_dora",
            ));
        }
        if !self.layers_pattern.is_empty() && self.layers_to_transform.is_none() {
            return Err(unsupported(
                "layers_pattern",
                &json!(self.layers_pattern),
                "it needs `layers_to_transform` as well",
            ));
        }
        crate::target::Selector::new(self).map(|_| ())
    }

    /// The deciding fields as JSON with sorted keys and sets in sorted order: equal for configurations that mean
    /// the same. It is what [`crate::Adapter::digest`] covers.
    pub fn canonical_json(&self) -> String {
        let set = |targets: &Targets| match targets {
            Targets::List(list) => {
                let mut list = list.clone();
                list.sort();
                list.dedup();
                json!(list)
            }
            Targets::Regex(pattern) => json!(pattern),
            Targets::AllLinear => json!("all-linear"),
        };
        json!({
            "alpha_pattern": self.alpha_pattern,
            "bias": match self.bias {
                BiasMode::None => "none",
                BiasMode::All => "all",
                BiasMode::LoraOnly => "lora_only",
            },
            "exclude_modules": self.exclude_modules.as_ref().map(set),
            "fan_in_fan_out": self.fan_in_fan_out,
            "layers_pattern": self.layers_pattern,
            "layers_to_transform": self.layers_to_transform,
            "lora_alpha": self.lora_alpha,
            "lora_bias": self.lora_bias,
            "modules_to_save": self.modules_to_save,
            "r": self.r,
            "rank_pattern": self.rank_pattern,
            "target_modules": set(&self.target_modules),
            "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
        })
        .to_string()
    }
}

/// A configuration is a page of text; a larger one is not a configuration.
pub(crate) const MAX_CONFIG_BYTES: usize = 16 << 20;

/// `null`, `false`, or an empty string, list or object.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Accepts the initialisations after which the saved A and B are all there is.
fn init_scheme(value: &Value) -> Result<()> {
    match value {
        Value::Null | Value::Bool(_) => Ok(()),
        Value::String(s)
            if ["gaussian", "eva", "orthogonal", "true", "false"].contains(&s.to_lowercase().as_str()) =>
        {
            Ok(())
        }
        Value::String(_) => Err(unsupported(
            "init_lora_weights",
            value,
            "this initialisation alters the base weights or the layer; convert the adapter with \
             `save_pretrained(path_initial_model_for_weight_conversion=…)`",
        )),
        _ => Err(field("init_lora_weights", "a boolean or a string", value)),
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        text
    } else {
        text.chars().take(60).chain("…".chars()).collect()
    }
}

fn field(name: &str, expected: &'static str, value: &Value) -> Error {
    Error::ConfigField {
        field: name.to_owned(),
        expected,
        found: short(value),
    }
}

fn unsupported(name: &str, value: &Value, reason: &'static str) -> Error {
    Error::Unsupported {
        field: name.to_owned(),
        value: short(value),
        reason,
    }
}

fn boolean(name: &str, value: &Value) -> Result<bool> {
    match value {
        Value::Bool(b) => Ok(*b),
        Value::Null => Ok(false),
        _ => Err(field(name, "a boolean", value)),
    }
}

fn positive(name: &str, value: &Value) -> Result<usize> {
    match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
        Some(n) if n > 0 => Ok(n),
        _ => Err(field(name, "a positive integer", value)),
    }
}

fn number(name: &str, value: &Value) -> Result<f64> {
    value
        .as_f64()
        .filter(|n| n.is_finite())
        .ok_or_else(|| field(name, "a finite number", value))
}

fn strings(name: &str, value: &Value, list: &[Value]) -> Result<Vec<String>> {
    let each = list.iter().map(|v| v.as_str().map(str::to_owned));
    each.collect::<Option<Vec<_>>>()
        .ok_or_else(|| field(name, "a list of strings", value))
}

/// A list of strings, or one string standing for a list of one; `null` is empty.
fn one_or_many(name: &str, value: &Value) -> Result<Vec<String>> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(s) if s.is_empty() => Ok(Vec::new()),
        Value::String(s) => Ok(vec![s.clone()]),
        Value::Array(list) => strings(name, value, list),
        _ => Err(field(name, "a list of strings", value)),
    }
}

fn targets(name: &str, value: &Value) -> Result<Option<Targets>> {
    match value {
        Value::Null => Ok(None),
        Value::String(s) if s.eq_ignore_ascii_case("all-linear") => Ok(Some(Targets::AllLinear)),
        Value::String(s) => Ok(Some(Targets::Regex(s.clone()))),
        Value::Array(list) => Ok(Some(Targets::List(strings(name, value, list)?))),
        _ => Err(field(name, "a list of strings or a string", value)),
    }
}

/// An integer or a list of integers. An empty list means all layers, as `null` does.
fn indices(name: &str, value: &Value) -> Result<Option<Vec<u64>>> {
    let bad = || field(name, "an integer ≥ 0 or a list of such integers", value);
    match value {
        Value::Null => Ok(None),
        Value::Number(n) => Ok(Some(vec![n.as_u64().ok_or_else(bad)?])),
        Value::Array(list) => {
            let list: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
            Ok(Some(list.ok_or_else(bad)?))
        }
        _ => Err(bad()),
    }
}

fn dictionary<T>(
    name: &str,
    value: &Value,
    each: impl Fn(&str, &Value) -> Result<T>,
) -> Result<Vec<(String, T)>> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(map) => map.iter().map(|(k, v)| Ok((k.clone(), each(name, v)?))).collect(),
        _ => Err(field(name, "an object", value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(extra: &str) -> Result<AdapterConfig> {
        AdapterConfig::from_json(&format!(r#"{{"peft_type": "LORA"{extra}}}"#))
    }

    #[test]
    fn defaults_are_pefts() {
        assert_eq!(parse("").unwrap(), AdapterConfig::default());
    }

    #[test]
    fn every_refused_field_is_named_when_on_and_passes_when_off() {
        for (name, _) in REFUSED {
            for off in ["null", "false", "{}", "[]"] {
                parse(&format!(r#", "{name}": {off}"#)).unwrap();
            }
            for on in ["true", "[1]", r#"{"a": 1}"#, "\"x\"", "1"] {
                match parse(&format!(r#", "{name}": {on}"#)) {
                    Err(Error::Unsupported { field, .. }) => assert_eq!(field, *name),
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn unknown_fields_pass_only_when_off() {
        parse(r#", "brand_new": null, "other_new": {}"#).unwrap();
        for on in ["0", "true", "\"x\""] {
            let result = parse(&format!(r#", "brand_new": {on}"#));
            assert!(matches!(result, Err(Error::Unsupported { field, .. }) if field == "brand_new"));
        }
    }

    #[test]
    fn initialisations_that_alter_the_base_are_refused() {
        for scheme in [
            "pissa",
            "pissa_niter_16",
            "olora",
            "corda",
            "loftq",
            "lora_ga",
            "mica",
        ] {
            let result = parse(&format!(r#", "init_lora_weights": "{scheme}""#));
            assert!(matches!(result, Err(Error::Unsupported { field, .. }) if field == "init_lora_weights"));
        }
        parse(r#", "init_lora_weights": "gaussian""#).unwrap();
    }

    #[test]
    fn the_canonical_form_ignores_the_order_of_sets_and_of_fields() {
        let a = parse(r#", "r": 4, "target_modules": ["a", "b"]"#).unwrap();
        let b = parse(r#", "target_modules": ["b", "a"], "r": 4, "peft_version": "9""#).unwrap();
        assert_eq!(a.canonical_json(), b.canonical_json());
        let c = parse(r#", "target_modules": ["b", "a"], "r": 5"#).unwrap();
        assert_ne!(a.canonical_json(), c.canonical_json());
    }
}
