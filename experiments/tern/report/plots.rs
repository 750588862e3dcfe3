//! Plots of a machine's rows, as SVG: readable on light and dark pages, and the same bytes for the same rows.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result};
use common::lab::compare::{How, Joined, Threads, compare};
use common::lab::table::{params, printable, short};
use common::lab::{Claim, Folder, Metric, Record, Run, split_params};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::tables::commit;

/// A picture.
pub struct Plot {
    /// File name, without `.svg`.
    name: &'static str,
    /// The experiment it belongs to, as `exp-NN`; `None` for a picture of all of them.
    pub experiment: Option<&'static str>,
    /// What it shows, for those who cannot see it.
    pub alt: String,
    /// The file.
    pub svg: String,
}

impl Plot {
    /// Where it goes, from the machine's folder.
    pub fn path(&self) -> String {
        format!("plots/{}.svg", self.name)
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 860;
/// Colours that stand out on white and on near-black.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x3b, 0x82, 0xc4),
    RGBColor(0xe0, 0x7b, 0x39),
    RGBColor(0x3a, 0x9a, 0x5b),
    RGBColor(0xcc, 0x4b, 0x4b),
    RGBColor(0x8a, 0x63, 0xc8),
    RGBColor(0xa0, 0x70, 0x3c),
    RGBColor(0x80, 0x80, 0x80),
];
const GREY: RGBColor = RGBColor(0x80, 0x80, 0x80);

/// The plots that the folder has rows for. `published` are folders of published figures.
///
/// # Errors
/// Parameters that do not parse.
pub fn draw(folder: &Folder, ledger: &[Claim], published: &[Folder]) -> Result<Vec<Plot>> {
    let plots = [
        claims(folder, ledger, published)?,
        bandwidth(folder)?,
        tokens(folder)?,
        bits(folder)?,
        roofline(folder)?,
    ];
    Ok(plots.into_iter().flatten().collect())
}

/// The picture with its title, the machine, and the commits of the rows it shows.
fn picture(
    folder: &Folder,
    runs: &[&Run],
    (name, experiment): (&'static str, Option<&'static str>),
    (title, height): (&str, u32),
    paint: impl FnOnce(&Area) -> Result<()>,
) -> Result<Plot> {
    let mut commits: Vec<String> = runs.iter().map(|r| commit(r)).collect();
    commits.sort();
    commits.dedup();
    let more = if commits.len() > 3 { ", ..." } else { "" };
    commits.truncate(3);
    let quick = if runs.iter().any(|r| r.meta.quick) {
        ", quick runs"
    } else {
        ""
    };
    let below = printable(&format!(
        "{} ({}), {} threads; commit {}{more}{quick}",
        folder.name,
        folder.machine.cpu,
        folder.machine.threads,
        commits.join(", ")
    ));
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        text(&area, (16, 14), title, 17, (HPos::Left, VPos::Top), &BLACK)?;
        text(&area, (16, 37), &below, 12, (HPos::Left, VPos::Top), &BLACK)?;
        paint(&area.margin(58, 8, 12, 12))?;
        area.present()?;
    }
    Ok(Plot {
        name,
        experiment,
        alt: title.into(),
        svg: themed(&svg),
    })
}

/// Black and white exchanged where the reader's page is dark, on a background of its own, so that a picture is
/// readable wherever it is pasted.
fn themed(svg: &str) -> String {
    let style = "\n<style>\
        .page{fill:#fff}\
        @media(prefers-color-scheme:dark){\
        .page{fill:#0d1117}[fill=\"#000000\"]{fill:#e6edf3}[stroke=\"#000000\"]{stroke:#e6edf3}\
        }</style>\n<rect class=\"page\" width=\"100%\" height=\"100%\"/>";
    match svg.split_once('>') {
        Some((head, rest)) => format!("{head}>{style}{rest}"),
        None => svg.into(),
    }
}

fn text(
    area: &Area,
    at: (i32, i32),
    text: &str,
    size: i32,
    (h, v): (HPos, VPos),
    colour: &RGBColor,
) -> Result<()> {
    let style = ("sans-serif", pixels(size))
        .into_font()
        .color(colour)
        .pos(Pos::new(h, v));
    area.draw(&Text::new(text.to_string(), at, style))?;
    Ok(())
}

/// The library's SVG writes a font size divided by 1.24.
fn pixels(size: i32) -> f64 {
    f64::from(size) * 1.24
}

fn bar(
    area: &Area,
    (left, top): (i32, i32),
    (width, height): (i32, i32),
    colour: RGBColor,
) -> Result<()> {
    let corners = [(left, top), (left + width, top + height)];
    area.draw(&Rectangle::new(corners, colour.filled()))?;
    Ok(())
}

/// One axis; with `log2`, values are placed by their logarithm.
struct Axis<'a> {
    label: &'a str,
    log2: bool,
    range: Range<f64>,
    show: fn(f64) -> String,
}

impl Axis<'_> {
    fn place(&self, value: f64) -> f64 {
        if self.log2 { value.log2() } else { value }
    }

    fn placed(&self) -> Range<f64> {
        self.place(self.range.start)..self.place(self.range.end)
    }

    fn tick(&self, placed: f64) -> String {
        (self.show)(if self.log2 { placed.exp2() } else { placed })
    }
}

/// How a series' points look.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    /// A line through them, and no points.
    Line,
    /// Points of one of six shapes, by number.
    Points(usize),
    /// Both.
    Both,
}

/// (x, y, interval of y).
type Point = (f64, f64, Option<(f64, f64)>);

struct Series {
    name: String,
    colour: RGBColor,
    mark: Mark,
    points: Vec<Point>,
}

/// Points and lines over two axes, with a legend on the right.
fn chart(area: &Area, x: &Axis, y: &Axis, series: &[Series]) -> Result<()> {
    let (plot, legend) = area.split_horizontally(WIDTH as i32 - 24 - 200);
    let mut chart = ChartBuilder::on(&plot)
        .margin_right(12)
        .x_label_area_size(44)
        .y_label_area_size(62)
        .build_cartesian_2d(x.placed(), y.placed())?;
    let span = |range: Range<f64>| (range.end - range.start).ceil() as usize + 1;
    let labels = |axis: &Axis| {
        if axis.log2 {
            span(axis.placed()).min(16)
        } else {
            9
        }
    };
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GREY.mix(0.25))
        .axis_style(BLACK)
        .label_style(("sans-serif", pixels(12)))
        .axis_desc_style(("sans-serif", pixels(13)))
        .x_desc(x.label)
        .y_desc(y.label)
        .x_labels(labels(x))
        .y_labels(labels(y))
        .x_label_formatter(&|v| x.tick(*v))
        .y_label_formatter(&|v| y.tick(*v))
        .draw()?;
    for (i, one) in series.iter().enumerate() {
        let placed: Vec<(f64, f64)> = one
            .points
            .iter()
            .map(|(px, py, _)| (x.place(*px), y.place(*py)))
            .collect();
        if !matches!(one.mark, Mark::Points(_)) {
            let line = PathElement::new(placed.clone(), one.colour.stroke_width(2));
            chart.draw_series([line])?;
        }
        let style = one.colour.stroke_width(1);
        for (px, _, interval) in &one.points {
            if let Some((low, high)) = interval {
                let ends = [low, high].map(|e| (x.place(*px), y.place(e.max(y.range.start))));
                chart.draw_series([PathElement::new(ends.to_vec(), style)])?;
            }
        }
        for at in placed {
            let (px, py) = chart.backend_coord(&at);
            let origin = plot.get_base_pixel();
            mark(&plot, (px - origin.0, py - origin.1), one)?;
        }
        let top = 10 + 19 * i as i32;
        if matches!(one.mark, Mark::Points(_)) {
            mark(&legend, (14, top + 6), one)?;
        } else {
            bar(&legend, (6, top + 5), (16, 3), one.colour)?;
        }
        text(
            &legend,
            (30, top),
            &one.name,
            12,
            (HPos::Left, VPos::Top),
            &BLACK,
        )?;
    }
    Ok(())
}

/// A point of a series.
fn mark(area: &Area, (x, y): (i32, i32), series: &Series) -> Result<()> {
    let fill = series.colour.filled();
    let corners = |points: &[(i32, i32)]| {
        Polygon::new(
            points
                .iter()
                .map(|(dx, dy)| (x + dx, y + dy))
                .collect::<Vec<_>>(),
            fill,
        )
    };
    match series.mark {
        Mark::Line => return Ok(()),
        Mark::Both => area.draw(&Circle::new((x, y), 3, fill))?,
        Mark::Points(shape) => match shape % 6 {
            0 => area.draw(&Circle::new((x, y), 5, fill))?,
            1 => area.draw(&corners(&[(-5, -5), (5, -5), (5, 5), (-5, 5)]))?,
            2 => area.draw(&corners(&[(-6, 5), (6, 5), (0, -6)]))?,
            3 => area.draw(&corners(&[(-6, -5), (6, -5), (0, 6)]))?,
            4 => area.draw(&corners(&[(0, -7), (6, 0), (0, 7), (-6, 0)]))?,
            _ => area.draw(&corners(&[(-7, -2), (7, -2), (7, 2), (-7, 2)]))?,
        },
    }
    Ok(())
}

/// A parameter of a row.
fn param(record: &Record, key: &str) -> Result<Option<String>> {
    let pairs = split_params(&record.params).with_context(|| record.key().to_string())?;
    Ok(pairs.into_iter().find(|(k, _)| k == key).map(|(_, v)| v))
}

fn number(record: &Record, key: &str) -> Result<Option<f64>> {
    Ok(param(record, key)?.and_then(|v| v.parse().ok()))
}

fn ends(record: &Record) -> Option<(f64, f64)> {
    record.interval.as_ref().map(|i| (i.low, i.high))
}

/// The largest of `values` and a tenth more.
fn top(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, f64::max) * 1.1
}

/// exp-01: the best way to read, by working set, a line a thread count.
fn bandwidth(folder: &Folder) -> Result<Option<Plot>> {
    let Some(run) = folder.run("exp-01") else {
        return Ok(None);
    };
    let mut best: BTreeMap<usize, BTreeMap<u64, &Record>> = BTreeMap::new();
    for record in run.records.iter().filter(|r| r.metric == Metric::Bandwidth) {
        let Some(bytes) = number(record, "bytes")?.filter(|b| *b >= 1.0) else {
            continue;
        };
        let sets = best.entry(record.threads).or_default();
        let held = sets.entry(bytes as u64).or_insert(record);
        if record.value > held.value {
            *held = record;
        }
    }
    let sets: Vec<u64> = best.values().flat_map(|s| s.keys().copied()).collect();
    let (Some(least), Some(most)) = (sets.iter().min(), sets.iter().max()) else {
        return Ok(None);
    };
    let series: Vec<Series> = best
        .iter()
        .zip(COLOURS.iter().cycle())
        .map(|((threads, sets), colour)| Series {
            name: counted(*threads),
            colour: *colour,
            mark: Mark::Both,
            points: sets
                .iter()
                .map(|(bytes, r)| (*bytes as f64, r.value, ends(r)))
                .collect(),
        })
        .collect();
    let x = Axis {
        label: "working set, bytes",
        log2: true,
        range: *least as f64..(*most as f64 * 1.5),
        show: bytes,
    };
    let y = Axis {
        label: "GB/s",
        log2: false,
        range: 0.0..top(series.iter().flat_map(|s| s.points.iter().map(|p| p.1))),
        show: short,
    };
    let title = "Read bandwidth by working set and threads, best way to read (GB/s)";
    let name = ("bandwidth", Some("exp-01"));
    picture(folder, &[run], name, (title, 460), |area| {
        chart(area, &x, &y, &series)
    })
    .map(Some)
}

fn counted(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

/// A power of two in its unit.
fn bytes(value: f64) -> String {
    for (unit, scale) in [("GB", 30), ("MB", 20), ("KB", 10)] {
        let scaled = value / f64::from(1 << scale);
        if scaled >= 0.999 {
            return format!("{}{unit}", short(scaled.round()));
        }
    }
    short(value.round())
}

/// exp-15: every kernel under the roofs that memory and multipliers set, with all threads.
fn roofline(folder: &Folder) -> Result<Option<Plot>> {
    let Some(run) = folder.run("exp-15") else {
        return Ok(None);
    };
    let mut by_place = [("DRAM", "dram", Vec::new()), ("cache", "cache", Vec::new())];
    for record in &run.records {
        // A row `of` several kernels, such as the fastest, repeats one of theirs.
        if param(record, "batch")?.as_deref() == Some("1") && param(record, "of")?.is_none() {
            let from = param(record, "from")?;
            let mut places = by_place.iter_mut();
            if let Some(place) = places.find(|(_, name, _)| from.as_deref() == Some(*name)) {
                place.2.push(record);
            }
        }
    }
    // A quick run measures nothing from DRAM.
    let Some((place, _, mut decode)) = by_place.into_iter().find(|p| !p.2.is_empty()) else {
        return Ok(None);
    };
    let all = decode.iter().map(|r| r.threads).max().unwrap_or(1);
    decode.retain(|r| r.threads == all);
    let on_all = || run.records.iter().filter(|r| r.threads == all);
    let mut series: Vec<Series> = Vec::new();
    let (mut isas, mut layouts): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for rate in decode.iter().filter(|r| r.metric == Metric::WeightsPerS) {
        let same = |r: &&&Record| r.variant == rate.variant && r.isa == rate.isa;
        let moved = decode
            .iter()
            .filter(same)
            .find(|r| r.metric == Metric::Bandwidth);
        let Some(moved) = moved.filter(|r| r.value > 0.0) else {
            continue;
        };
        let name = format!("{} {}", rate.variant, rate.isa);
        // A kernel that is measured at two widths, or named the fastest in a row of its own, is one series.
        if series.iter().any(|s| s.name == name) {
            continue;
        }
        let weights_a_byte = rate.value / moved.value;
        let mut points = vec![(weights_a_byte, rate.value, ends(rate))];
        for prefill in on_all().filter(|r| r.metric == Metric::MacPerS && same(&r)) {
            if let Some(batch) = number(prefill, "batch")?.filter(|b| *b >= 1.0) {
                points.push((weights_a_byte * batch, prefill.value, ends(prefill)));
            }
        }
        series.push(Series {
            name,
            colour: COLOURS[place_of(&mut isas, &rate.isa) % COLOURS.len()],
            mark: Mark::Points(place_of(&mut layouts, &rate.variant)),
            points,
        });
    }
    let points = || series.iter().flat_map(|s| s.points.iter());
    let values = || points().map(|p| p.1).filter(|v| *v > 0.0);
    let (least, most) = (
        values().fold(f64::MAX, f64::min),
        values().fold(0.0, f64::max),
    );
    if most == 0.0 {
        return Ok(None);
    }

    let peak_run = folder.run("exp-04");
    let peaks = peak_run.into_iter().flat_map(|r| &r.records);
    let peak = peaks
        .filter(|r| r.variant == "multiply-peak" && r.threads == all)
        .max_by(|a, b| a.value.total_cmp(&b.value));
    let x_end = points().map(|p| p.0).fold(8.0, f64::max) * 1.8;
    let (x_start, y_end) = (2.0, most.max(peak.map_or(0.0, |p| p.value)) * 1.6);
    let mut roofs = Vec::new();
    if let Some(peak) = peak {
        roofs.push(Series {
            name: format!("multiply peak, {}", peak.isa),
            colour: BLACK,
            mark: Mark::Line,
            points: [x_start, x_end].map(|x| (x, peak.value, None)).to_vec(),
        });
    }
    let walls = on_all().filter(|r| r.variant == "read" && r.metric == Metric::Bandwidth);
    if let Some(wall) = walls.max_by(|a, b| a.value.total_cmp(&b.value)) {
        let end = x_end
            .min(peak.map_or(y_end, |p| p.value) / wall.value)
            .max(x_start);
        roofs.push(Series {
            name: format!("plain reads, {} GB/s", short(wall.value)),
            colour: GREY,
            mark: Mark::Line,
            points: [x_start, end].map(|x| (x, x * wall.value, None)).to_vec(),
        });
    }
    let lowest = roofs.iter().flat_map(|r| r.points.iter().map(|p| p.1));
    let least = lowest.fold(least, f64::min);
    roofs.extend(series);
    let x = Axis {
        label: "multiply-accumulates a byte of weights (one token at left, a batch at right)",
        log2: true,
        range: x_start..x_end,
        show: short,
    };
    let y = Axis {
        label: "GMAC/s (for one token: Gw/s)",
        log2: true,
        range: (least / 1.6)..y_end,
        show: short,
    };
    let runs: Vec<&Run> = [Some(run), peak.and(peak_run)]
        .into_iter()
        .flatten()
        .collect();
    let threads = counted(all);
    let title =
        format!("Roofline: one token from {place} and a batch from cache, {threads} (GMAC/s)");
    let height = 90 + (19 * roofs.len() as u32).max(400);
    let name = ("roofline", Some("exp-15"));
    picture(folder, &runs, name, (&title, height), |area| {
        chart(area, &x, &y, &roofs)
    })
    .map(Some)
}

/// The place of a name in a list, to which it is added where it is missing.
fn place_of<'a>(list: &mut Vec<&'a str>, name: &'a str) -> usize {
    match list.iter().position(|n| *n == name) {
        Some(place) => place,
        None => {
            list.push(name);
            list.len() - 1
        }
    }
}

/// exp-08: tokens a second with all threads, each before the ceiling that memory sets.
fn tokens(folder: &Folder) -> Result<Option<Plot>> {
    let Some(run) = folder.run("exp-08") else {
        return Ok(None);
    };
    let all = run.records.iter().map(|r| r.threads).max().unwrap_or(1);
    let rates = || {
        let with_all = run.records.iter().filter(|r| r.threads == all);
        with_all.filter(|r| r.metric == Metric::TokensPerS && r.baseline.is_empty())
    };
    let mut bars: Vec<(&Record, Option<f64>)> = Vec::new();
    for rate in rates() {
        let mut shares = run.records.iter().filter(|r| {
            (r.metric == Metric::Share && r.baseline == "read")
                && (r.variant == rate.variant && r.isa == rate.isa)
                && (r.threads == rate.threads && r.params == rate.params)
        });
        let by_share = shares.next().filter(|r| r.value > 0.0);
        let ceiling = by_share.map(|share| rate.value * 100.0 / share.value);
        bars.push((rate, ceiling));
    }
    if bars.is_empty() {
        return Ok(None);
    }
    // Rates of one token and of batches differ by an order of magnitude: a scale each.
    let phase = |r: &Record| param(r, "phase").map(Option::unwrap_or_default);
    let mut scales: BTreeMap<String, f64> = BTreeMap::new();
    for (rate, ceiling) in &bars {
        let most = scales.entry(phase(rate)?).or_default();
        *most = most.max(rate.value).max(ceiling.unwrap_or(0.0));
    }
    bars.sort_by_key(|(rate, _)| phase(rate).unwrap_or_default());
    let title = format!(
        "Tokens a second against the ceiling that memory sets, {} (tok/s)",
        counted(all)
    );
    const BARS: i32 = 392;
    let line = 24;
    let height = 58 + 40 + line * bars.len() as u32;
    let name = ("tokens", Some("exp-08"));
    picture(folder, &[run], name, (&title, height), |area| {
        let left = (HPos::Left, VPos::Center);
        for (x, colour, what) in [
            (BARS, COLOURS[0], "measured"),
            (BARS + 100, GREY, "ceiling"),
        ] {
            bar(area, (x, 2), (12, 12), colour)?;
            text(area, (x + 18, 8), what, 12, left, &BLACK)?;
        }
        for (i, (rate, ceiling)) in bars.iter().enumerate() {
            let y = 28 + line as i32 * i as i32;
            let what = format!("{} {}, {}", rate.variant, rate.isa, params(&rate.params));
            text(area, (0, y + 7), &cut(&what, 60), 12, left, &BLACK)?;
            let scale = 240.0 / scales[&phase(rate)?];
            let length = |value: f64| ((value * scale) as i32).max(1);
            let mut label = short(rate.value);
            if let Some((low, high)) = ends(rate) {
                label += &format!(" [{}, {}]", short(low), short(high));
            }
            let mut end = length(rate.value);
            if let Some(ceiling) = ceiling {
                bar(area, (BARS, y + 4), (length(*ceiling), 6), GREY)?;
                end = end.max(length(*ceiling));
                label += &format!(" of {}", short(*ceiling));
            }
            bar(area, (BARS, y), (length(rate.value), 14), COLOURS[0])?;
            text(area, (BARS + end + 6, y + 7), &label, 11, left, &BLACK)?;
        }
        Ok(())
    })
    .map(Some)
}

/// exp-13: bits a weight by the share of zeros, a series a format.
fn bits(folder: &Folder) -> Result<Option<Plot>> {
    let Some(run) = folder.run("exp-13") else {
        return Ok(None);
    };
    let mut formats: Vec<&str> = Vec::new();
    let mut points: Vec<Vec<Point>> = Vec::new();
    for record in run
        .records
        .iter()
        .filter(|r| r.metric == Metric::BitsPerWeight)
    {
        let Some(zeros) = number(record, "zeros")? else {
            continue;
        };
        let format = place_of(&mut formats, &record.variant);
        points.resize(formats.len(), Vec::new());
        points[format].push((zeros, record.value, ends(record)));
    }
    if points.is_empty() {
        return Ok(None);
    }
    for point in points.iter_mut().flatten() {
        point.0 *= 100.0;
    }
    let series: Vec<Series> = formats
        .iter()
        .zip(points)
        .zip(COLOURS.iter().cycle())
        .map(|((format, mut points), colour)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Series {
                name: printable(format),
                colour: *colour,
                mark: Mark::Both,
                points,
            }
        })
        .collect();
    let all = || series.iter().flat_map(|s| s.points.iter());
    let x = Axis {
        label: "zeros, % of the weights",
        log2: false,
        range: 0.0..all().map(|p| p.0).fold(60.0, f64::max),
        show: short,
    };
    let y = Axis {
        label: "bits a weight",
        log2: false,
        range: 0.0..top(all().map(|p| p.1)),
        show: short,
    };
    let title = "Bits a weight by the share of zeros (bit)";
    let name = ("bits", Some("exp-13"));
    picture(folder, &[run], name, (title, 460), |area| {
        chart(area, &x, &y, &series)
    })
    .map(Some)
}

/// Each claim as published and as measured here: the quantity that the verdict here rests on, where its source published
/// the same; else what the source's own figure is of, where this machine has that row; else the two figures, if their
/// metric is the same and says what it is of, as a count does not.
fn claims(folder: &Folder, ledger: &[Claim], published: &[Folder]) -> Result<Option<Plot>> {
    let mut pairs: Vec<(&Claim, Record, Record)> = Vec::new();
    for source in published.iter().filter(|f| f.path != folder.path) {
        let both = [source.clone(), folder.clone()];
        let how = How {
            exact: false,
            threshold_percent: 0.0,
        };
        let joined = compare(&both, how).joined;
        for finding in &source.findings {
            let claim = ledger.iter().find(|c| c.id == finding.claim);
            let (Some(claim), Some(theirs)) = (claim, source.record(&finding.key)) else {
                continue;
            };
            let ours = folder.findings.iter().find(|f| f.claim == finding.claim);
            let ours = ours.and_then(|f| folder.record(&f.key));
            let all_or_one = |j: &&Joined| {
                (j.records[0].threads == 1) == (j.subject.threads == Threads::Count(1))
            };
            let of_ours = || {
                let mut same = joined.iter().filter(all_or_one);
                same.find(|j| ours.is_some_and(|r| r.key() == j.records[1].key()))
            };
            let of_theirs = || {
                let mut same = joined.iter().filter(all_or_one);
                same.find(|j| j.records[0].key() == theirs.key())
            };
            let pair = of_ours()
                .or_else(of_theirs)
                .map(|j| (j.records[0].clone(), j.records[1].clone()))
                .or_else(|| {
                    let ours =
                        ours.filter(|r| r.metric == theirs.metric && r.metric != Metric::Count)?;
                    Some((theirs.clone(), ours.clone()))
                });
            if let Some((theirs, ours)) = pair {
                pairs.push((claim, theirs, ours));
            }
        }
    }
    if pairs.is_empty() {
        return Ok(None);
    }
    pairs.sort_by_key(|(claim, ..)| ledger.iter().position(|c| c.id == claim.id));
    let runs: Vec<&Run> = pairs
        .iter()
        .filter_map(|(_, _, ours)| folder.run(&ours.experiment))
        .collect();
    let line = 40;
    let height = 58 + 40 + line * pairs.len() as u32;
    let title =
        "Claims with a figure, as published and as measured here; each pair on a scale of its own";
    let plot = picture(folder, &runs, ("claims", None), (title, height), |area| {
        let (blue, orange) = (COLOURS[0], COLOURS[1]);
        let left = (HPos::Left, VPos::Center);
        for (x, colour, what) in [(330, orange, "published"), (430, blue, "measured here")] {
            bar(area, (x, 2), (12, 12), colour)?;
            text(area, (x + 18, 8), what, 12, left, &BLACK)?;
        }
        for (i, (claim, theirs, ours)) in pairs.iter().enumerate() {
            let y = 30 + line as i32 * i as i32;
            text(area, (0, y + 6), &claim.id, 12, left, &BLACK)?;
            for (line, part) in two_lines(&claim.claim, 46).iter().enumerate() {
                let at = (34, y + 6 + 15 * line as i32);
                text(area, at, part, 12, left, &BLACK)?;
            }
            let most = theirs.value.abs().max(ours.value.abs());
            for (row, record, colour) in [(0, theirs, orange), (1, ours, blue)] {
                let length = if most > 0.0 {
                    record.value.abs() / most * 210.0
                } else {
                    0.0
                };
                let top = y + 15 * row;
                bar(area, (330, top), ((length as i32).max(1), 12), colour)?;
                let at = (330 + (length as i32).max(1) + 6, top + 6);
                text(area, at, &labelled(record), 11, left, &BLACK)?;
            }
        }
        Ok(())
    })?;
    Ok(Some(plot))
}

/// Value, unit, interval and what it is of.
fn labelled(record: &Record) -> String {
    let mut text = format!("{} {}", short(record.value), record.metric.unit());
    if let Some((low, high)) = ends(record) {
        text = format!("{} [{}, {}]", text.trim_end(), short(low), short(high));
    }
    let what = format!("{} {}", record.variant, record.isa);
    printable(&format!("{}  {}", text.trim_end(), cut(what.trim(), 22)))
}

/// Text in at most two lines of at most that many characters.
fn two_lines(text: &str, columns: usize) -> Vec<String> {
    let fits = |(at, _): &(usize, &str)| text[..*at].chars().count() <= columns;
    match text.match_indices(' ').take_while(fits).last() {
        Some((at, _)) if text.chars().count() > columns => {
            vec![printable(&text[..at]), cut(&text[at + 1..], columns)]
        }
        _ => vec![cut(text, columns)],
    }
}

fn cut(text: &str, columns: usize) -> String {
    let shown = printable(text);
    if shown.chars().count() <= columns {
        return shown;
    }
    shown.chars().take(columns - 3).collect::<String>() + "..."
}
