//! What a sweep has measured, on disk after every set of options, so that it can go on after an interruption.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cli::CliError;
use crate::tuned::{ModelShape, TunedOptions};

/// What became of a set of options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// New tokens a second of each part of the workload, and the mean difference of log-probabilities from the defaults.
    Measured(Vec<f64>, f64),
    /// It changed numbers, by this mean difference of log-probabilities.
    ThrownOut(f64),
    /// The device or the shape cannot run it.
    Refused(String),
}

impl Outcome {
    /// With as many digits as survive being written and read.
    pub(super) fn measured(rates: &[f64], difference: f64) -> Self {
        let rounded = |x: f64, steps: f64| (x * steps).round() / steps;
        let rates = rates.iter().map(|rate| rounded(*rate, 1e3)).collect();
        Self::Measured(rates, rounded(difference, 1e9))
    }
}

/// A set of options and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) options: TunedOptions,
    pub(super) outcome: Outcome,
}

impl Entry {
    /// Geometric mean of its rates over another's; 0 for one that cannot be taken.
    pub(super) fn over(&self, other: &Self) -> f64 {
        match (self.rates(), other.rates()) {
            (Some(ours), Some(theirs)) => over(ours, theirs),
            _ => 0.0,
        }
    }

    pub(super) fn rates(&self) -> Option<&[f64]> {
        match &self.outcome {
            Outcome::Measured(rates, _) => Some(rates),
            _ => None,
        }
    }
}

/// Geometric mean of rates over others; 0 for those that cannot be compared.
pub(super) fn over(ours: &[f64], theirs: &[f64]) -> f64 {
    if ours.len() != theirs.len() || ours.is_empty() {
        return 0.0;
    }
    let logarithms = ours.iter().zip(theirs).map(|(a, b)| (a / b).ln());
    (logarithms.sum::<f64>() / ours.len() as f64).exp()
}

/// Runs of the best set of options and of the defaults, in turn: new tokens a second of each part of the workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Duel {
    pub(super) options: TunedOptions,
    pub(super) ours: Vec<Vec<f64>>,
    pub(super) defaults: Vec<Vec<f64>>,
}

impl Duel {
    /// Whether every run was faster than all of the defaults.
    pub(super) fn is_won(&self) -> bool {
        let beats_all = |ours: &Vec<f64>| self.defaults.iter().all(|theirs| over(ours, theirs) > 1.0);
        self.ours.iter().all(beats_all)
    }
}

/// What a sweep is about: one of another device, model or workload cannot go on from its file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct About {
    pub(super) device: String,
    pub(super) model: ModelShape,
    pub(super) backend: String,
    pub(super) batches: Vec<usize>,
    pub(super) max_new_tokens: usize,
    pub(super) n_rounds: usize,
    /// Flags that hold for all sets of options.
    pub(super) fixed: TunedOptions,
    pub(super) tolerance: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct File {
    about: About,
    entries: Vec<Entry>,
    #[serde(default)]
    duels: Vec<Duel>,
}

/// All that was measured.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// `None` keeps nothing.
    file: Option<(PathBuf, About)>,
    entries: Vec<Entry>,
    duels: Vec<Duel>,
}

impl State {
    /// That of a file, if there is one, and empty otherwise. What is added is written there.
    pub(super) fn open(path: &Path, about: About) -> Result<Self, CliError> {
        let fail = |reason: String| CliError::Failed(format!("{}: {reason}", path.display()));
        let (entries, duels) = match std::fs::read_to_string(path) {
            Ok(text) => {
                let file: File = serde_json::from_str(&text)
                    .map_err(|error| fail(format!("not the state of a sweep: {error}")))?;
                if file.about != about {
                    return Err(CliError::Usage(format!(
                        "--state {} is of a sweep with another device, model, workload or tolerance: name another file, or delete it",
                        path.display()
                    )));
                }
                (file.entries, file.duels)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (Vec::new(), Vec::new()),
            Err(error) => return Err(fail(error.to_string())),
        };
        let state = Self {
            file: Some((path.to_path_buf(), about)),
            entries,
            duels,
        };
        // A place that cannot be written to shows before anything is measured.
        state.write()?;
        Ok(state)
    }

    #[cfg(test)]
    pub(super) fn in_memory() -> Self {
        Self {
            file: None,
            entries: Vec::new(),
            duels: Vec::new(),
        }
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn thrown_out(&self) -> impl Iterator<Item = &Entry> {
        self.entries
            .iter()
            .filter(|entry| matches!(entry.outcome, Outcome::ThrownOut(_)))
    }

    pub(super) fn find(&self, options: &TunedOptions) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.options == *options)
    }

    pub(super) fn add(&mut self, options: TunedOptions, outcome: Outcome) -> Result<Entry, CliError> {
        let entry = Entry { options, outcome };
        self.entries.push(entry.clone());
        self.write()?;
        Ok(entry)
    }

    pub(super) fn duel(&self, options: &TunedOptions) -> Option<&Duel> {
        self.duels.iter().find(|duel| duel.options == *options)
    }

    pub(super) fn add_duel(&mut self, duel: Duel) -> Result<(), CliError> {
        self.duels.push(duel);
        self.write()
    }

    fn write(&self) -> Result<(), CliError> {
        let Some((path, about)) = &self.file else {
            return Ok(());
        };
        let fail = |reason: String| CliError::Failed(format!("{}: {reason}", path.display()));
        let file = File {
            about: about.clone(),
            entries: self.entries.clone(),
            duels: self.duels.clone(),
        };
        let text = serde_json::to_string_pretty(&file).map_err(|error| fail(error.to_string()))?;
        let unfinished = path.with_extension("unfinished");
        std::fs::write(&unfinished, text + "\n")
            .and_then(|()| std::fs::rename(&unfinished, path))
            .map_err(|error| fail(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> About {
        About {
            device: "a CPU".into(),
            model: ModelShape::of(&qwen3_model::Qwen3Config::qwen3_4b(), false),
            backend: "cpu".into(),
            batches: vec![4],
            max_new_tokens: 8,
            n_rounds: 1,
            fixed: TunedOptions::default(),
            tolerance: 0.05,
        }
    }

    #[test]
    fn a_state_goes_on_from_its_file_and_from_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let mut state = State::open(&path, about()).unwrap();
        let options: TunedOptions = serde_json::from_str("{\"page_size\": 32}").unwrap();
        for outcome in [
            Outcome::Measured(vec![1.5], 0.01),
            Outcome::ThrownOut(0.7),
            Outcome::Refused("no".into()),
        ] {
            state.add(options, outcome).unwrap();
        }
        let duel = Duel {
            options,
            ours: vec![vec![3.0]],
            defaults: vec![vec![2.5]],
        };
        state.add_duel(duel.clone()).unwrap();
        let again = State::open(&path, about()).unwrap();
        assert_eq!(again.entries(), state.entries());
        assert_eq!(again.duel(&options), Some(&duel));
        assert_eq!(again.find(&options), Some(&state.entries()[0]));
        assert_eq!(again.thrown_out().count(), 1);
        let other = About {
            batches: vec![5],
            ..about()
        };
        assert!(matches!(State::open(&path, other), Err(CliError::Usage(_))));
        std::fs::write(&path, "{}").unwrap();
        assert!(State::open(&path, about()).is_err());
        assert!(State::open(&dir.path().join("no/folder"), about()).is_err());
    }

    #[test]
    fn entries_are_compared_by_the_mean_of_their_ratios() {
        let entry = |rates: &[f64]| Entry {
            options: TunedOptions::default(),
            outcome: Outcome::Measured(rates.to_vec(), 0.0),
        };
        let ratio = entry(&[4.0, 100.0]).over(&entry(&[1.0, 100.0]));
        assert!((ratio - 2.0).abs() < 1e-12);
        let out = Entry {
            outcome: Outcome::ThrownOut(1.0),
            ..entry(&[])
        };
        assert_eq!(
            (out.over(&entry(&[1.0])), entry(&[1.0]).over(&entry(&[1.0, 1.0]))),
            (0.0, 0.0)
        );
    }
}
