//! Results as pictures: SVG and PNG of each.
//!
//! By `plotters`: without its defaults it draws both from the same code and drags in but a rasteriser
//! of fonts; its own PNG encoder would bring all of `image`, so `png` alone writes that. Fonts come with
//! the program (DejaVu), for a server has none.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use super::baseline::PARTLY_LOCAL;
use super::contest::{OUTRAM, label, us_of};
use super::results::{Results, Series};
use super::statistics::{Distribution, Spread};

const SIZE: (u32, u32) = (1000, 620);
const FONT: &str = "sans-serif";
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(110, 110, 110),
    RGBColor(0, 0, 0),
];

/// A line: its name and its points.
type Line = (String, Vec<(f64, f64)>);

/// A picture: its title, its axes and its lines.
struct Picture {
    file: String,
    title: String,
    axes: (&'static str, &'static str),
    /// Whether the first axis is of latencies, each ten times the one before; the second always is so.
    is_of_latencies: bool,
    lines: Vec<Line>,
}

/// Draws all pictures of a run into a folder; the names of their files.
pub fn draw(results: &Results, folder: &Path) -> Result<Vec<String>> {
    register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("the font cannot be used"))?;
    let mut files = Vec::new();
    for picture in pictures(results) {
        let svg = format!("{}.svg", picture.file);
        let path = folder.join(&svg);
        {
            let area = SVGBackend::new(&path, SIZE).into_drawing_area();
            paint(&area, &picture).map_err(|error| anyhow!("drawing {svg}: {error}"))?;
        }
        let name = format!("{}.png", picture.file);
        let mut pixels = vec![255; (SIZE.0 * SIZE.1 * 3) as usize];
        {
            let area = BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area();
            paint(&area, &picture).map_err(|error| anyhow!("drawing {name}: {error}"))?;
        }
        let file = BufWriter::new(File::create(folder.join(&name))?);
        let mut encoder = png::Encoder::new(file, SIZE.0, SIZE.1);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.write_header()?.write_image_data(&pixels)?;
        files.extend([svg, name]);
    }
    Ok(files)
}

fn pictures(results: &Results) -> Vec<Picture> {
    let mut pictures = vec![Picture {
        file: "latencies".to_owned(),
        title: "Latencies: share of uses that took longer".to_owned(),
        axes: ("µs", "share that took longer"),
        is_of_latencies: true,
        lines: [
            "wire round trip",
            "uffd round trip, spinning",
            "uffd round trip, sleeping",
            "remote fault",
            "remote fault at the limit",
        ]
        .iter()
        .filter_map(|&name| Some((name.to_owned(), tail(results.distributions.get(name)?))))
        .collect(),
    }];
    let mut names: Vec<&str> = results
        .series
        .iter()
        .map(|series| series.workload.as_str())
        .collect();
    names.dedup();
    names.sort_unstable();
    names.dedup();
    let outram = names
        .iter()
        .map(|name| (name.to_string(), slowdowns(results, name, OUTRAM)));
    pictures.push(slowdown(
        "slowdown",
        "Outram: slowdown by local ratio",
        outram.collect(),
    ));
    for name in names {
        let memories = [&[OUTRAM][..], &PARTLY_LOCAL].concat();
        let lines = memories
            .iter()
            .map(|memory| (memory.to_string(), slowdowns(results, name, memory)));
        let title = format!("{name}: slowdown by local ratio");
        pictures.push(slowdown(
            &format!("slowdown-{name}"),
            &title,
            lines.collect(),
        ));
    }
    pictures.extend(sweeps(results));
    for picture in &mut pictures {
        picture.lines.retain(|(_, points)| !points.is_empty());
    }
    pictures.retain(|picture| !picture.lines.is_empty());
    pictures
}

fn slowdown(file: &str, title: &str, lines: Vec<Line>) -> Picture {
    Picture {
        file: file.to_owned(),
        title: title.to_owned(),
        axes: ("local ratio", "time ÷ time with all memory local"),
        is_of_latencies: false,
        lines,
    }
}

/// AIFM's sweep: slowdown by how much a workload computes for each operation, of workloads that were run
/// with more than one such amount.
fn sweeps(results: &Results) -> Vec<Picture> {
    let mut names: Vec<&str> = results.series.iter().map(name_of).collect();
    names.sort_unstable();
    names.dedup();
    let of = |name: &str| {
        let lines = sweep(results, name);
        let is_sweep = lines.iter().any(|(_, points)| points.len() > 1);
        is_sweep.then(|| Picture {
            file: format!("compute-{name}"),
            title: format!("{name}: slowdown by computing for each operation"),
            axes: (
                "µs of computing for each operation",
                "time ÷ time with all memory local",
            ),
            is_of_latencies: false,
            lines,
        })
    };
    names.into_iter().filter_map(of).collect()
}

/// The workload's name, without its extra work.
fn name_of(series: &Series) -> &str {
    let extra = label("", series.compute);
    series
        .workload
        .strip_suffix(&extra)
        .unwrap_or(&series.workload)
}

/// By local ratio, slowdowns with each amount of extra work.
fn sweep(results: &Results, name: &str) -> Vec<Line> {
    let ours = |series: &&Series| {
        name_of(series) == name && series.memory == OUTRAM && series.local_ratio < 1.0
    };
    let mut lines: Vec<Line> = Vec::new();
    for series in results.series.iter().filter(ours) {
        let at = series.local_ratio;
        let points = slowdowns(results, &series.workload, OUTRAM);
        let Some((_, slowdown)) = points.into_iter().find(|point| point.0 == at) else {
            continue;
        };
        let point = (us_of(series.compute), slowdown);
        let title = format!("{OUTRAM} at {at}");
        match lines.iter_mut().find(|(known, _)| *known == title) {
            Some((_, points)) => points.push(point),
            None => lines.push((title, vec![point])),
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
    }
    lines
}

/// Of each latency, the share of uses that took longer.
fn tail(distribution: &Distribution) -> Vec<(f64, f64)> {
    let mut left = distribution.count;
    let points = distribution.pairs.iter().map(|&(ns, count)| {
        left = left.saturating_sub(count);
        (ns as f64 / 1000.0, left as f64 / distribution.count as f64)
    });
    points.filter(|point| point.1 > 0.0).collect()
}

/// Medians of a memory's runs by those with all memory local, by local ratio.
fn slowdowns(results: &Results, workload: &str, memory: &str) -> Vec<(f64, f64)> {
    let seconds =
        |series: &Series| -> Vec<f64> { series.runs.iter().map(|run| run.seconds).collect() };
    let Some(local) = results.series(workload, "memfd", 1.0).map(seconds) else {
        return Vec::new();
    };
    let of_it = results
        .series
        .iter()
        .filter(|series| series.workload == workload && series.memory == memory);
    let mut points: Vec<(f64, f64)> = of_it
        .filter_map(|series| {
            let ratio = Spread::of_ratios(&seconds(series), &local)?;
            Some((series.local_ratio, ratio.median))
        })
        .collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    points
}

type Painted<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn paint<B: DrawingBackend>(area: &DrawingArea<B, Shift>, picture: &Picture) -> Painted<B> {
    area.fill(&WHITE)?;
    let points = || picture.lines.iter().flat_map(|(_, points)| points);
    let ends = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::MAX, f64::MIN), |ends, value| {
            (ends.0.min(value), ends.1.max(value))
        })
    };
    let (left, right) = ends(&mut points().map(|point| point.0));
    let (low, high) = ends(&mut points().map(|point| point.1));
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(&picture.title, (FONT, 22))
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(70);
    // A macro, for the two charts are of different types.
    macro_rules! fill {
        ($chart:expr) => {{
            let mut chart = $chart;
            chart
                .configure_mesh()
                .x_desc(picture.axes.0)
                .y_desc(picture.axes.1)
                .label_style((FONT, 14))
                .draw()?;
            for ((name, points), colour) in picture.lines.iter().zip(COLOURS.iter().cycle()) {
                chart
                    .draw_series(LineSeries::new(
                        points.iter().copied(),
                        colour.stroke_width(2),
                    ))?
                    .label(name)
                    .legend(move |(x, y)| {
                        PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(3))
                    });
            }
            if !picture.is_of_latencies {
                for ((_, points), colour) in picture.lines.iter().zip(COLOURS.iter().cycle()) {
                    let dots = points
                        .iter()
                        .map(|&point| Circle::new(point, 4, colour.filled()));
                    chart.draw_series(dots)?;
                }
            }
            chart
                .configure_series_labels()
                .label_font((FONT, 14))
                .background_style(WHITE.mix(0.85))
                .border_style(BLACK)
                .draw()?;
        }};
    }
    match picture.is_of_latencies {
        true => fill!(builder.build_cartesian_2d(
            (left.max(0.01)..right * 1.05).log_scale(),
            (low.max(1e-6)..1.0).log_scale(),
        )?),
        false => fill!(builder.build_cartesian_2d(
            (left - 0.02).min(0.2)..(right * 1.02).max(1.02),
            (low.min(0.9)..high * 1.2).log_scale(),
        )?),
    }
    area.present()
}

#[cfg(test)]
mod tests {
    use super::super::phase::Run;
    use super::super::results::Series;
    use super::super::results::tests::sample;
    use super::*;

    #[test]
    fn the_tail_falls_to_nothing() {
        let distribution = Distribution {
            count: 4,
            pairs: vec![(1000, 2), (3000, 1), (9000, 1)],
            ..Distribution::default()
        };
        assert_eq!(tail(&distribution), [(1.0, 0.5), (3.0, 0.25)]);
        assert!(tail(&Distribution::default()).is_empty());
    }

    #[test]
    fn pictures_are_drawn_both_ways() {
        let mut results = sample();
        results.note_run(Series {
            workload: "quicksort".to_owned(),
            memory: "memfd".to_owned(),
            local_ratio: 1.0,
            bytes: 1,
            compute: 0,
            runs: vec![Run {
                seconds: 1.0,
                ..Run::default()
            }],
        });
        let folder = tempfile::tempdir().expect("a folder");
        let files = draw(&results, folder.path()).expect("drawn");
        assert_eq!(files.len(), 6, "{files:?}");
        let svg = std::fs::read_to_string(folder.path().join("slowdown.svg")).expect("drawn");
        assert!(svg.contains("quicksort"), "{svg}");
        let png = File::open(folder.path().join("slowdown.png")).expect("drawn");
        let mut reader = png::Decoder::new(std::io::BufReader::new(png))
            .read_info()
            .expect("a PNG");
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        reader.next_frame(&mut pixels).expect("a PNG");
        let dark = pixels
            .chunks(3)
            .filter(|pixel| pixel.iter().all(|&level| level < 100))
            .count();
        assert!(dark > 500, "{dark} pixels of text and axes");
    }

    #[test]
    fn a_sweep_has_a_point_for_each_amount_of_computing() {
        let mut results = Results::default();
        for (compute, local, paged) in [(2500, 4.0, 5.0), (0, 1.0, 3.0), (250, 2.0, 4.0)] {
            for (memory, local_ratio, seconds) in [("memfd", 1.0, local), (OUTRAM, 0.5, paged)] {
                results.note_run(Series {
                    workload: label("kv-4k", compute),
                    memory: memory.to_owned(),
                    local_ratio,
                    bytes: 1,
                    compute,
                    runs: vec![Run {
                        seconds,
                        ..Run::default()
                    }],
                });
            }
        }
        let lines = sweep(&results, "kv-4k");
        let points = vec![(0.0, 3.0), (1.0, 2.0), (10.0, 1.25)];
        assert_eq!(lines, [("outram at 0.5".to_owned(), points)]);
        assert_eq!(sweeps(&results).len(), 1);
        results.series.retain(|series| series.compute == 0);
        assert!(sweeps(&results).is_empty(), "one amount is no sweep");
    }

    #[test]
    fn nothing_measured_draws_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = draw(&Results::default(), folder.path()).expect("nothing to draw");
        assert!(files.is_empty(), "{files:?}");
    }
}
