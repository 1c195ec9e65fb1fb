//! `rollout plot`: what `rollout bench --stats-path` measured, as an SVG.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use cuda_graphs::BucketSet;
use plotters::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::CliError;
use super::output::distinct_files;

mod growth;

pub(super) use growth::write_growth;

/// Width and height of the picture, in pixels.
const SIZE: (u32, u32) = (960, 720);
/// One for each series, in turn: told apart also by readers who see few colours.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 90, 181),
    RGBColor(220, 80, 32),
    RGBColor(26, 133, 88),
    RGBColor(136, 34, 136),
    RGBColor(150, 110, 0),
    RGBColor(80, 80, 80),
];

#[derive(Debug, Args)]
pub(super) struct PlotArgs {
    /// Files that `rollout bench --stats-path` has written; one alone if it was written with --context-lengths.
    #[arg(value_name = "STATS.json", required = true)]
    stats: Vec<PathBuf>,

    /// What the horizontal axis is: prompts at once, the bucket that they run in, or the mean context at mid-run, in
    /// tokens.
    #[arg(long, value_name = "AXIS", value_enum, default_value_t = Axis::Prompts)]
    against: Axis,

    /// Figures of other engines to draw beside: a JSON object from names to lists of [x, new tokens per second].
    #[arg(long, value_name = "FILE.json")]
    plot_other: Option<PathBuf>,

    /// The picture.
    #[arg(long, value_name = "FILE.svg")]
    output: PathBuf,
}

/// The horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Axis {
    /// Prompts at once.
    Prompts,
    /// The bucket that they run in.
    Bucket,
    /// Tokens of a sequence at mid-run.
    Context,
}

impl Axis {
    fn label(self) -> &'static str {
        match self {
            Self::Prompts => "prompts at once",
            Self::Bucket => "bucket of the batch",
            Self::Context => "mean context at mid-run, tokens",
        }
    }
}

/// What is read of one measurement.
#[derive(Clone, Debug, Deserialize)]
struct Measurement {
    n_prompts: usize,
    max_new_tokens: usize,
    decode_tps_median: f64,
    /// `None` where too few steps were measured.
    step_ms: Option<f64>,
    floor_ms: Option<f64>,
    device: String,
    #[serde(default)]
    backend: Option<String>,
    #[serde(default)]
    lora_rank: Option<usize>,
}

impl Measurement {
    /// Its place on the horizontal axis; `buckets` are those of the whole sweep.
    fn x(&self, axis: Axis, buckets: Option<&BucketSet>) -> f64 {
        match axis {
            Axis::Prompts => self.n_prompts as f64,
            Axis::Bucket => {
                let bucket = buckets.and_then(|buckets| buckets.for_batch(self.n_prompts));
                bucket.unwrap_or(self.n_prompts) as f64
            }
            // Prompts of the benchmark's workload, and half of what is generated.
            Axis::Context => {
                let prompts: usize = (0..self.n_prompts).map(|i| 64 + i * 37 % 193).sum();
                prompts as f64 / self.n_prompts as f64 + self.max_new_tokens as f64 / 2.0
            }
        }
    }

    fn series(&self, axis: Axis) -> String {
        let mut name = self.backend.clone().unwrap_or_else(|| "rollout".into());
        if let Some(rank) = self.lora_rank {
            name += &format!(", LoRA rank {rank}");
        }
        match axis {
            Axis::Context => name += &format!(", {} prompts", self.n_prompts),
            Axis::Prompts | Axis::Bucket => name += &format!(", {} new tokens", self.max_new_tokens),
        }
        name
    }
}

/// A line: its points sorted by x.
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
    /// A bound rather than a measurement.
    dashed: bool,
}

pub(super) fn run(args: &PlotArgs) -> Result<(), CliError> {
    for read in args.stats.iter().chain(&args.plot_other) {
        distinct_files(&[
            (&read.display().to_string(), Some(read)),
            ("--output", Some(&args.output)),
        ])?;
    }
    let mut stats = Vec::new();
    for path in &args.stats {
        let value = read_json(path)?;
        if growth::is_growth(&value) {
            return match args.stats.len() {
                1 => write_growth(&value, &args.output),
                _ => Err(CliError::Usage(format!(
                    "{} has steps against context lengths: draw it alone",
                    path.display()
                ))),
            };
        }
        // One measurement, or a list of them.
        let list = match value {
            Value::Array(list) => list,
            one => vec![one],
        };
        stats.extend(parse_stats(list).map_err(|reason| {
            CliError::Failed(format!(
                "{}: not what --stats-path writes: {reason}",
                path.display()
            ))
        })?);
    }
    write(&stats, args.plot_other.as_deref(), args.against, &args.output)
}

/// Draws what `rollout bench` has just measured, against the prompts at once.
#[cfg(feature = "cuda")]
pub(super) fn write_reports(reports: &[Value], other: Option<&Path>, path: &Path) -> Result<(), CliError> {
    let stats = parse_stats(reports.to_vec()).map_err(CliError::Failed)?;
    write(&stats, other, Axis::Prompts, path)
}

fn write(stats: &[Measurement], other: Option<&Path>, axis: Axis, path: &Path) -> Result<(), CliError> {
    let other = other.map_or(Ok(Vec::new()), read_other)?;
    let svg = draw(stats, other, axis)?;
    std::fs::write(path, svg).map_err(|error| CliError::Failed(format!("{}: {error}", path.display())))
}

fn read_json(path: &Path) -> Result<Value, CliError> {
    let fail = |error: String| CliError::Failed(format!("{}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| fail(error.to_string()))
}

fn parse_stats(list: Vec<Value>) -> Result<Vec<Measurement>, String> {
    let mut measured = Vec::new();
    for value in list {
        let one: Measurement = serde_json::from_value(value).map_err(|error| error.to_string())?;
        if one.n_prompts == 0 || one.n_prompts > 1 << 20 {
            return Err(format!("n_prompts is {}", one.n_prompts));
        }
        measured.push(one);
    }
    match measured.is_empty() {
        true => Err("an empty list".into()),
        false => Ok(measured),
    }
}

fn read_other(path: &Path) -> Result<Vec<Series>, CliError> {
    let series: BTreeMap<String, Vec<(f64, f64)>> =
        serde_json::from_value(read_json(path)?).map_err(|error| {
            CliError::Failed(format!(
                "{}: {error}; expected an object from names to lists of [x, new tokens per second]",
                path.display()
            ))
        })?;
    let series = series.into_iter().map(|(name, points)| Series {
        name,
        points: sorted(points),
        dashed: false,
    });
    Ok(series.collect())
}

fn sorted(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// The measurements' series of `y`, in the order of their first appearance.
fn series(measured: &[Measurement], axis: Axis, y: impl Fn(&Measurement) -> Option<f64>) -> Vec<Series> {
    let largest = measured.iter().map(|one| one.n_prompts).max();
    let buckets = largest.and_then(|largest| BucketSet::new(largest).ok());
    let mut series: Vec<Series> = Vec::new();
    for one in measured {
        let Some(y) = y(one) else { continue };
        let (name, point) = (one.series(axis), (one.x(axis, buckets.as_ref()), y));
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series {
                name,
                points: vec![point],
                dashed: false,
            }),
        }
    }
    for series in &mut series {
        series.points = sorted(std::mem::take(&mut series.points));
    }
    series
}

/// The floors' series of what was measured, without those that repeat another's points.
fn floors(measured: &[Measurement], axis: Axis, y: impl Fn(&Measurement, f64) -> f64) -> Vec<Series> {
    let mut floors = series(measured, axis, |one| {
        let measured = one.decode_tps_median.is_finite();
        one.floor_ms.filter(|_| measured).map(|floor| y(one, floor))
    });
    let mut seen: Vec<Vec<(f64, f64)>> = Vec::new();
    floors.retain(|floor| {
        let new = !seen.contains(&floor.points);
        seen.push(floor.points.clone());
        new
    });
    for floor in &mut floors {
        floor.name = match axis {
            Axis::Context => format!("floor: {}", floor.name),
            _ => "floor: weights and context read once a step".into(),
        };
        floor.dashed = true;
    }
    floors
}

/// Two panels over the same axis: new tokens per second, and milliseconds of a decode step.
fn draw(measured: &[Measurement], other: Vec<Series>, axis: Axis) -> Result<String, CliError> {
    let mut throughput = series(measured, axis, |one| Some(one.decode_tps_median));
    throughput.extend(other);
    throughput.extend(floors(measured, axis, |one, ms| one.n_prompts as f64 * 1e3 / ms));
    let mut steps = series(measured, axis, |one| one.step_ms);
    steps.extend(floors(measured, axis, |_, ms| ms));
    let devices: std::collections::BTreeSet<_> = measured.iter().map(|one| one.device.as_str()).collect();
    let title = devices.into_iter().collect::<Vec<_>>().join("; ");
    let mut svg = String::new();
    render(
        &mut svg,
        &title,
        axis.label(),
        &[("new tokens / s", &throughput), ("ms per decode step", &steps)],
    )
    .map_err(|error| CliError::Failed(format!("the plot cannot be drawn: {error}")))?;
    Ok(svg)
}

type DrawError = Box<dyn std::error::Error>;

/// The places on the horizontal axis, in order, and the greatest height; `None` if there is nothing to draw.
fn extent(series: &[Series]) -> Option<(Vec<f64>, f64)> {
    let points = series.iter().flat_map(|series| &series.points);
    let usable = points.filter(|(x, y)| x.is_finite() && *x > 0.0 && y.is_finite() && *y >= 0.0);
    let (mut xs, mut top) = (Vec::new(), 0f64);
    for (x, y) in usable {
        xs.push(*x);
        top = top.max(*y);
    }
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    (!xs.is_empty()).then_some((xs, top))
}

fn render(
    svg: &mut String,
    title: &str,
    x_label: &str,
    panels: &[(&str, &[Series])],
) -> Result<(), DrawError> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let area = area.titled(title, ("sans-serif", 20))?;
    for (panel, (label, series)) in area.split_evenly((panels.len(), 1)).iter().zip(panels) {
        let Some((xs, top)) = extent(series) else {
            return Err("there is no positive, finite number in it".into());
        };
        let (first, last) = (xs[0], xs[xs.len() - 1]);
        let mut chart = ChartBuilder::on(panel)
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(75)
            .build_cartesian_2d(
                (first / 1.1..last * 1.1)
                    .log_scale()
                    .base(2.0)
                    .with_key_points(xs),
                0.0..top.max(1e-9) * 1.08,
            )?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc(x_label)
            .y_desc(*label)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y}"))
            .draw()?;
        for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
            let points = series.points.iter().copied();
            let points = points.filter(|(x, y)| x.is_finite() && *x > 0.0 && y.is_finite());
            let key = move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2));
            if series.dashed {
                chart
                    .draw_series(DashedLineSeries::new(points, 6, 4, BLACK.stroke_width(1)))?
                    .label(&series.name)
                    .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLACK.stroke_width(1)));
            } else {
                chart
                    .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
                    .label(&series.name)
                    .legend(key);
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(batches: &[(usize, f64, f64)], new_tokens: usize) -> Vec<Measurement> {
        let list = batches.iter().map(|(prompts, tps, step)| {
            serde_json::json!({
                "n_prompts": prompts, "max_new_tokens": new_tokens, "decode_tps_median": tps, "step_ms": step,
                "floor_ms": step / 2.0, "device": "GPU <&> 1", "backend": "cuda, random:tiny", "lora_rank": null,
            })
        });
        parse_stats(list.collect()).expect("valid")
    }

    /// Pixels of the measured points: centres of circles, in the order drawn.
    fn circles(svg: &str) -> Vec<(f64, f64)> {
        let value = |circle: &str, key: &str| {
            let rest = circle.split_once(&format!("{key}=\"")).expect("is there").1;
            rest.split('"')
                .next()
                .expect("ends")
                .parse::<f64>()
                .expect("a number")
        };
        let circles = svg.split("<circle ").skip(1);
        circles
            .map(|circle| (value(circle, "cx"), value(circle, "cy")))
            .collect()
    }

    #[test]
    fn points_stand_where_their_numbers_say() {
        let stats = measured(&[(4, 400.0, 2.0), (1, 100.0, 1.0), (16, 800.0, 4.0)], 64);
        let other = vec![Series {
            name: "another <engine>".into(),
            points: vec![(1.0, 50.0), (16.0, 400.0)],
            dashed: false,
        }];
        let svg = draw(&stats, other, Axis::Prompts).expect("draws");
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        for text in [
            "GPU &lt;&amp;&gt; 1",
            "another &lt;engine&gt;",
            "cuda, random:tiny, 64 new tokens",
            "floor: weights",
            "prompts at once",
        ] {
            assert!(svg.contains(text), "{text} is not in the picture");
        }
        let points = circles(&svg);
        let [a, b, c, d, e, step_a, step_b, step_c] = points[..] else {
            panic!("{points:?}")
        };
        // Sorted by batch; equal ratios are equal distances; the rate is linear from 0 at the bottom of the panel.
        assert!((b.0 - a.0 - (c.0 - b.0)).abs() <= 1.0, "{points:?}");
        assert_eq!((d.0, e.0), (a.0, c.0));
        assert_eq!(e.1, b.1, "both 400");
        assert!(((a.1 - b.1) / (b.1 - c.1) - 0.75).abs() < 0.05, "{points:?}");
        assert!(
            step_a.1 > step_b.1 && step_b.1 > step_c.1 && step_c.1 > a.1,
            "the lower panel"
        );
    }

    #[test]
    fn other_axes_place_the_same_measurements() {
        let mut stats = measured(&[(3, 100.0, 1.0), (40, 900.0, 2.0)], 64);
        assert_eq!(stats[0].x(Axis::Bucket, BucketSet::new(40).ok().as_ref()), 4.0);
        assert_eq!(
            stats[1].x(Axis::Context, None),
            (0..40).map(|i| 64 + i * 37 % 193).sum::<usize>() as f64 / 40.0 + 32.0
        );
        stats.extend(measured(&[(3, 90.0, 1.5)], 1024));
        let svg = draw(&stats, Vec::new(), Axis::Context).expect("draws");
        assert!(svg.contains("3 prompts") && svg.contains("40 prompts") && svg.contains("mean context"));
        assert_eq!(circles(&svg).len(), 6);
    }

    #[test]
    fn what_is_not_a_measurement_is_refused() {
        for (value, word) in [
            (serde_json::json!({}), "n_prompts"),
            (
                serde_json::json!({"n_prompts": 0, "max_new_tokens": 1, "decode_tps_median": 1, "step_ms": 1, "device": ""}),
                "n_prompts is 0",
            ),
            (serde_json::json!(3), "invalid type"),
        ] {
            let error = parse_stats(vec![value]).expect_err(word);
            assert!(error.contains(word), "{error}");
        }
        assert!(parse_stats(Vec::new()).is_err());
        let mut stats = measured(&[(1, 1.0, 1.0)], 1);
        stats[0].decode_tps_median = f64::NAN;
        assert!(
            draw(&stats, Vec::new(), Axis::Prompts).is_err(),
            "nothing to draw"
        );
    }
}
