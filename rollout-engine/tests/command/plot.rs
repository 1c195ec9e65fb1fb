//! Pictures of what was measured.

use std::path::Path;

use crate::common::{assert_error, folder, run, write};

#[test]
fn the_plot_in_the_documentation_is_that_of_its_numbers() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let dir = folder();
    let svg = dir.path().join("throughput.svg");
    let outcome = run(&[
        "plot",
        &format!("{docs}/data/h200-qwen3-4b.json"),
        "--plot-other",
        &format!("{docs}/data/h200-qwen3-4b-other.json"),
        "--output",
        svg.to_str().expect("UTF-8"),
    ]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let read = |path: &Path| std::fs::read_to_string(path).expect("is there");
    let drawn = read(&svg);
    assert!(
        drawn == read(Path::new(&format!("{docs}/throughput.svg"))),
        "draw docs/throughput.svg anew with `rollout plot`"
    );
    for text in ["vLLM 0.22.1", "floor: weights", "new tokens / s"] {
        assert!(drawn.contains(text), "{text}");
    }
}

#[test]
fn the_plot_of_growth_in_the_documentation_is_that_of_its_numbers() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let dir = folder();
    let svg = dir.path().join("growth.svg");
    let data = format!("{docs}/data/h200-qwen3-4b-growth.json");
    let to = svg.to_str().expect("UTF-8");
    let outcome = run(&["plot", &data, "--output", to]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let read = |path: &Path| std::fs::read_to_string(path).expect("is there");
    assert!(
        read(&svg) == read(Path::new(&format!("{docs}/growth.svg"))),
        "draw docs/growth.svg anew with `rollout plot`"
    );
    assert_error(
        &run(&["plot", &data, &data, "--output", to]),
        2,
        &["alone"],
        "beside something else",
    );
}

#[test]
fn a_plot_over_a_file_that_it_reads_is_refused_and_leaves_it_as_it_is() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let dir = folder();
    let numbers = std::fs::read_to_string(format!("{docs}/data/h200-qwen3-4b.json")).expect("is there");
    let stats = write(dir.path(), "stats.json", &numbers);
    let other = write(dir.path(), "other.json", "{}");
    for read in [&stats, &other] {
        let outcome = run(&["plot", &stats, "--plot-other", &other, "--output", read]);
        assert_error(&outcome, 2, &["--output", read, "name another one"], read);
    }
    assert!(std::fs::read_to_string(&stats).expect("is there") == numbers);
    assert_eq!(std::fs::read_to_string(&other).expect("is there"), "{}");
}

#[test]
fn a_plot_of_something_else_is_refused() {
    let dir = folder();
    let stats = write(dir.path(), "stats.json", "{\"n_prompts\": 1}");
    let svg = format!("{}.svg", stats);
    let plot = |args: &[&str]| run(&[&["plot"], args, &["--output", &svg]].concat());
    assert_error(
        &plot(&[&stats]),
        1,
        &["stats.json", "max_new_tokens"],
        "half a measurement",
    );
    assert_error(&plot(&["/no/such/stats"]), 1, &["/no/such/stats"], "no file");
    assert_error(&plot(&[]), 2, &["STATS"], "nothing");
    assert!(!Path::new(&svg).exists());
}

#[test]
#[cfg(feature = "cuda")]
fn bench_plots_what_it_measures() {
    let dir = folder();
    let svg = dir.path().join("bench.svg");
    let stats = dir.path().join("stats.json");
    let [svg, stats] = [&svg, &stats].map(|path| path.to_str().expect("UTF-8").to_string());
    let bench = "bench --device cpu --batches 1,2 --n-rounds 1 --max-new-tokens 8 --stats-path";
    let mut args: Vec<&str> = bench.split(' ').collect();
    args.extend([stats.as_str(), "--plot", &svg]);
    let outcome = run(&args);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let again = format!("{svg}.again");
    assert_eq!(run(&["plot", &stats, "--output", &again]).code, Some(0));
    let read = |path: &str| std::fs::read_to_string(path).expect("was written");
    assert_eq!(read(&svg), read(&again));
    assert_eq!(
        read(&svg).matches("<circle").count(),
        4,
        "two batches in two panels"
    );
}
