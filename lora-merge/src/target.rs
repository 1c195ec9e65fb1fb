//! Which modules an adapter applies to, and with which rank and scaling: PEFT's rules in PEFT's order.

use crate::config::Targets;
use crate::module::ModuleKind;
use crate::pattern::Pattern;
use crate::{AdapterConfig, ModuleSpec, Result};

/// What an adapter does to one module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Selection {
    /// Nothing.
    None,
    /// A low-rank update.
    Adapted {
        /// Rank.
        r: usize,
        /// alpha / r or alpha / √r.
        scaling: f64,
    },
    /// The adapter file holds the whole module.
    Saved,
}

/// The compiled patterns of one configuration.
pub(crate) struct Selector<'a> {
    config: &'a AdapterConfig,
    target: Option<Pattern>,
    exclude: Option<Pattern>,
    saved: Vec<Pattern>,
    layers: Vec<Pattern>,
    ranks: Vec<(Pattern, usize)>,
    alphas: Vec<(Pattern, f64)>,
}

impl<'a> Selector<'a> {
    pub(crate) fn new(config: &'a AdapterConfig) -> Result<Self> {
        let regex = |field, targets: Option<&Targets>| match targets {
            Some(Targets::Regex(pattern)) => Pattern::full(field, pattern).map(Some),
            _ => Ok(None),
        };
        let saved = config.modules_to_save.iter();
        let saved = saved.map(|m| Pattern::prefix("modules_to_save", &format!(r"(^|.*\.){m}($|\..*)")));
        let layers: Result<Vec<_>> = if config.layers_pattern.is_empty() {
            Pattern::prefix("layers_pattern", r"(?:^|.*?\.)[^.]*\.(\d+)\.").map(|p| vec![p])
        } else {
            let each = config.layers_pattern.iter();
            each.map(|p| Pattern::prefix("layers_pattern", &format!(r"(?:^|.*?\.){p}\.(\d+)\.")))
                .collect()
        };
        Ok(Self {
            config,
            target: regex("target_modules", Some(&config.target_modules))?,
            exclude: regex("exclude_modules", config.exclude_modules.as_ref())?,
            saved: saved.collect::<Result<_>>()?,
            layers: layers?,
            ranks: keyed("rank_pattern", &config.rank_pattern)?,
            alphas: keyed("alpha_pattern", &config.alpha_pattern)?,
        })
    }

    /// What the adapter does to `module`. Exclusion comes first, then `modules_to_save`, then the targets.
    pub(crate) fn select(&self, module: &ModuleSpec) -> Result<Selection> {
        let name = module.name.as_str();
        let excluded = match (&self.config.exclude_modules, &self.exclude) {
            (_, Some(pattern)) => pattern.matches(name)?,
            (Some(Targets::List(list)), None) => listed(list, name),
            _ => false,
        };
        // A module that is saved whole is never adapted, excluded or not.
        if ancestors(name).any(|path| {
            self.config
                .modules_to_save
                .iter()
                .any(|entry| path.ends_with(entry.as_str()))
        }) {
            return Ok(Selection::Saved);
        }
        if excluded {
            return Ok(Selection::None);
        }
        for pattern in &self.saved {
            if pattern.matches(name)? {
                return Ok(Selection::None);
            }
        }
        if !self.is_target(module)? {
            return Ok(Selection::None);
        }
        let r = first(&self.ranks, name)?.unwrap_or(self.config.r);
        let alpha = first(&self.alphas, name)?.unwrap_or(self.config.lora_alpha);
        let divisor = if self.config.use_rslora {
            (r as f64).sqrt()
        } else {
            r as f64
        };
        Ok(Selection::Adapted {
            r,
            scaling: alpha / divisor,
        })
    }

    fn is_target(&self, module: &ModuleSpec) -> Result<bool> {
        let name = module.name.as_str();
        let list = match &self.config.target_modules {
            Targets::AllLinear => {
                // PEFT resolves the shorthand to full names, which the layer filter does not touch.
                return Ok(matches!(module.kind, ModuleKind::Linear | ModuleKind::Conv1d));
            }
            Targets::Regex(_) => return self.target.as_ref().map_or(Ok(false), |p| p.matches(name)),
            Targets::List(list) => list,
        };
        if list.iter().any(|entry| entry == name) {
            return Ok(true);
        }
        if !listed(list, name) {
            return Ok(false);
        }
        let Some(layers) = self
            .config
            .layers_to_transform
            .as_deref()
            .filter(|l| !l.is_empty())
        else {
            return Ok(true);
        };
        for pattern in &self.layers {
            if let Some(digits) = pattern.group(name)? {
                return Ok(digits.parse::<u64>().is_ok_and(|index| layers.contains(&index)));
            }
        }
        Ok(false)
    }
}

/// The name itself, then each module that contains it: a container that is saved whole saves its parts.
fn ancestors(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(name), |path| path.rsplit_once('.').map(|(head, _)| head))
}

/// Whether an entry equals `name` or is a dotted suffix of it.
fn listed(list: &[String], name: &str) -> bool {
    let suffix = |entry: &String| {
        name.strip_suffix(entry.as_str())
            .is_some_and(|head| head.ends_with('.'))
    };
    list.iter().any(|entry| entry == name || suffix(entry))
}

fn keyed<T: Copy>(field: &'static str, entries: &[(String, T)]) -> Result<Vec<(Pattern, T)>> {
    let each = entries.iter().map(|(key, value)| {
        // `re.match` with `$`: the same as a full match on names without line breaks.
        Ok((Pattern::full(field, &format!(r"(.*\.)?({key})"))?, *value))
    });
    each.collect()
}

fn first<T: Copy>(entries: &[(Pattern, T)], name: &str) -> Result<Option<T>> {
    for (pattern, value) in entries {
        if pattern.matches(name)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(config: &AdapterConfig, name: &str) -> Selection {
        Selector::new(config)
            .unwrap()
            .select(&ModuleSpec::linear(name, 4, 4))
            .unwrap()
    }

    fn adapted(config: &AdapterConfig, name: &str) -> bool {
        matches!(select(config, name), Selection::Adapted { .. })
    }

    #[test]
    fn rslora_divides_by_the_square_root_of_the_rank() {
        let mut config = AdapterConfig::new(16, 32.0, ["q_proj"]);
        assert_eq!(
            select(&config, "a.q_proj"),
            Selection::Adapted { r: 16, scaling: 2.0 }
        );
        config.use_rslora = true;
        assert_eq!(
            select(&config, "a.q_proj"),
            Selection::Adapted { r: 16, scaling: 8.0 }
        );
    }

    #[test]
    fn list_entries_match_whole_segments() {
        let config = AdapterConfig::new(8, 8.0, ["proj", "x.y"]);
        assert!(adapted(&config, "a.proj"));
        assert!(adapted(&config, "proj"));
        assert!(!adapted(&config, "a.q_proj"));
        assert!(adapted(&config, "b.x.y"));
    }

    #[test]
    fn target_modules_as_a_regex_string() {
        let mut config = AdapterConfig::new(8, 8.0, [""; 0]);
        config.target_modules = Targets::Regex(r".*layers\.[0-2]\.self_attn\.(q|o)_proj".into());
        assert!(adapted(&config, "model.layers.2.self_attn.o_proj"));
        assert!(!adapted(&config, "model.layers.3.self_attn.o_proj"));
        assert!(!adapted(&config, "model.layers.2.self_attn.o_proj.x"));
    }

    #[test]
    fn exclusion_wins_over_targets() {
        let mut config = AdapterConfig::new(8, 8.0, ["q_proj"]);
        config.exclude_modules = Some(Targets::List(vec!["layers.1.q_proj".into()]));
        assert!(adapted(&config, "layers.0.q_proj"));
        assert!(!adapted(&config, "model.layers.1.q_proj"));
        config.exclude_modules = Some(Targets::Regex(".*0.*".into()));
        assert!(!adapted(&config, "layers.0.q_proj"));
        assert!(adapted(&config, "layers.1.q_proj"));
    }

    #[test]
    fn the_layer_index_is_the_first_numbered_segment() {
        let mut config = AdapterConfig::new(8, 8.0, ["q_proj", "model.layers.7.q_proj"]);
        config.layers_to_transform = Some(vec![1]);
        assert!(adapted(&config, "model.layers.1.experts.0.q_proj"));
        assert!(!adapted(&config, "model.layers.0.experts.1.q_proj"));
        assert!(!adapted(&config, "model.q_proj"), "no index, not selected");
        assert!(adapted(&config, "layers.1.q_proj"));
        assert!(
            adapted(&config, "model.layers.7.q_proj"),
            "a full name bypasses the filter"
        );
        config.layers_pattern = vec!["blocks".into(), "experts".into()];
        assert!(adapted(&config, "model.layers.0.experts.1.q_proj"));
        assert!(!adapted(&config, "model.layers.1.experts.0.q_proj"));
        config.layers_to_transform = Some(vec![]);
        assert!(
            adapted(&config, "model.layers.5.q_proj"),
            "an empty list means all"
        );
    }

    #[test]
    fn the_first_matching_pattern_gives_rank_and_alpha() {
        let mut config = AdapterConfig::new(8, 16.0, ["q_proj", "o_proj"]);
        config.rank_pattern = vec![("layers.1.q_proj".into(), 2), ("q_proj|o_proj".into(), 4)];
        config.alpha_pattern = vec![(r"layers\.[01]\..*".into(), 32.0)];
        assert_eq!(
            select(&config, "model.layers.1.q_proj"),
            Selection::Adapted { r: 2, scaling: 16.0 }
        );
        assert_eq!(
            select(&config, "model.layers.0.q_proj"),
            Selection::Adapted { r: 4, scaling: 8.0 }
        );
        assert_eq!(
            select(&config, "model.layers.2.o_proj"),
            Selection::Adapted { r: 4, scaling: 4.0 }
        );
        config.rank_pattern = vec![("_proj".into(), 2)];
        assert_eq!(
            select(&config, "model.layers.2.o_proj"),
            Selection::Adapted { r: 8, scaling: 2.0 }
        );
    }

    #[test]
    fn all_linear_leaves_out_the_head_and_embeddings() {
        let config = AdapterConfig {
            target_modules: Targets::AllLinear,
            ..AdapterConfig::default()
        };
        let selector = Selector::new(&config).unwrap();
        assert_ne!(
            selector.select(&ModuleSpec::linear("a", 2, 2)).unwrap(),
            Selection::None
        );
        assert_eq!(
            selector
                .select(&ModuleSpec::output_head("lm_head", 2, 2))
                .unwrap(),
            Selection::None
        );
        assert_eq!(
            selector
                .select(&ModuleSpec::embedding("embed_tokens", 2, 2))
                .unwrap(),
            Selection::None
        );
    }

    #[test]
    fn saved_modules_are_not_adapted() {
        let mut config = AdapterConfig::new(8, 8.0, ["q_proj", "lm_head"]);
        config.modules_to_save = vec!["lm_head".into()];
        assert_eq!(select(&config, "lm_head"), Selection::Saved);
        config.exclude_modules = Some(Targets::List(vec!["lm_head".into()]));
        assert_eq!(select(&config, "lm_head"), Selection::Saved);
        config.modules_to_save = vec!["self_attn".into()];
        assert_eq!(
            select(&config, "model.layers.0.self_attn.q_proj"),
            Selection::Saved
        );
        assert_eq!(
            select(&config, "model.layers.0.mlp.q_proj"),
            Selection::Adapted { r: 8, scaling: 1.0 }
        );
    }
}
