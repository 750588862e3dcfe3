//! `tern report`: the rows of a machine as tables and plots, in the notebook pages and the README.

mod page;
mod plots;
mod tables;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use common::lab::sums::{SUMS, Sums, is_measured};
use common::lab::verify::check_ledger;
use common::lab::{self, Claim, Folder, Machine};

use plots::Plot;
use tables::Links;

/// Tables and plots of a machine's rows: spliced into the notebook pages and the README, and together in
/// results/<machine>/report.md and plots/, whose hashes go into SHA256SUMS. The same rows give the same bytes.
#[derive(clap::Args)]
pub struct Args {
    /// The machine, by its name under results/ [default: this machine].
    #[arg(long, value_name = "NAME", value_parser = lab::checked_name)]
    machine: Option<String>,
    /// Rows of quick runs, in target/quick; the pages and the README stay as they are.
    #[arg(long)]
    quick: bool,
    /// Rows in another folder, as given to the experiments; the pages and the README stay as they are.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write nothing: name what would change, and exit with 1 if anything would.
    #[arg(long)]
    check: bool,
}

/// Pages are text for people; anything larger is something else.
const LIMIT: u64 = 4 << 20;

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let root = lab::root();
    let name = || {
        args.machine
            .clone()
            .unwrap_or_else(|| Machine::here().slug())
    };
    let folder = match (&args.out, args.quick) {
        (Some(folder), _) => Folder::open(folder)?,
        (None, true) => Folder::open(&root.join("target/quick").join(name()))?,
        (None, false) => Folder::open(Path::new(&name()))?,
    };
    // The report vouches for every file in the folder, so for none that is not as its experiment left it.
    let mut sums = Sums::of(&folder.path)?;
    if let Some(wrong) = sums.wrong(&folder.path, is_measured)?.first() {
        bail!(
            "{}: {wrong} (where the change was meant, remove {SUMS} first)",
            folder.path.display()
        );
    }
    let results = root.join("results");
    let ledger = check_ledger(&results)?;
    let plots = plots::draw(&folder, &ledger, &published(&results)?)?;
    let pages = pages(&root)?;

    // Published figures have no report of their own: it would say what no machine showed.
    let measured = !is_published(&folder);
    let mut files = if measured {
        beside(&folder, &ledger, &pages, &plots)
    } else {
        Vec::new()
    };
    sums.retain(is_measured);
    for (path, text) in &files {
        if let Ok(name) = path.strip_prefix(&folder.path) {
            sums.set(&name.to_string_lossy().replace('\\', "/"), text.as_bytes());
        }
    }
    let own = folder.path.join("README.md");
    if own.is_file() {
        sums.set("README.md", &lab::read(&own, LIMIT)?);
    }
    files.push((folder.path.join(SUMS), String::from_utf8(sums.to_bytes())?));

    if args.out.is_none() && !args.quick && measured {
        let readme = root.join("README.md");
        let links = Links {
            rows: format!("results/{}/", folder.name),
            pages: Some("experiments/".into()),
        };
        let mut summary = tables::machine(&folder);
        summary += "\n";
        summary += &tables::verdicts(&ledger, &folder, &links);
        for plot in plots.iter().filter(|p| p.experiment.is_none()) {
            summary += &format!("\n{}", links.image(plot));
        }
        files.push((
            readme.clone(),
            page::splice(&readme, "verdicts", &summary, LIMIT)?,
        ));
        for page in &pages {
            let Some(path) = &page.path else {
                writeln!(out, "{}: has no README.md", page.experiment)?;
                continue;
            };
            let links = Links {
                rows: format!("{}results/{}/", page.up, folder.name),
                pages: None,
            };
            let own: Vec<&Plot> = plots
                .iter()
                .filter(|p| p.experiment.is_some_and(|e| page.experiment.starts_with(e)))
                .collect();
            let section = tables::experiment(&folder, &page.experiment, &ledger, &own, &links);
            files.push((
                path.clone(),
                page::splice(path, &page.experiment, &section, LIMIT)?,
            ));
        }
    }

    let changed: Vec<(PathBuf, Vec<u8>)> = files
        .into_iter()
        .map(|(path, text)| (path, text.into_bytes()))
        .filter(|(path, bytes)| fs::read(path).ok().as_ref() != Some(bytes))
        .collect();
    if !args.check {
        lab::write_files(&changed)?;
    }
    for (path, _) in &changed {
        let path = path.strip_prefix(&root).unwrap_or(path);
        let did = if args.check { "would change" } else { "wrote" };
        writeln!(out, "{did} {}", path.display())?;
    }
    if changed.is_empty() {
        writeln!(out, "{}: the report is up to date", folder.name)?;
    }
    Ok(ExitCode::from(u8::from(args.check && !changed.is_empty())))
}

/// The whole report, beside the rows, and its plots.
fn beside(
    folder: &Folder,
    ledger: &[Claim],
    pages: &[Page],
    plots: &[Plot],
) -> Vec<(PathBuf, String)> {
    let links = Links {
        rows: String::new(),
        pages: None,
    };
    let mut whole = format!("# {}\n\n", tables::escape(&folder.name));
    whole += &tables::machine(folder);
    whole += "\n";
    whole += &tables::verdicts(ledger, folder, &links);
    for plot in plots {
        whole += &format!("\n{}", links.image(plot));
    }
    for page in pages {
        whole += &format!("\n## {}\n\n", page.experiment);
        whole += &tables::experiment(folder, &page.experiment, ledger, &[], &links);
    }
    let mut files = vec![(folder.path.join("report.md"), whole)];
    files.extend(
        plots
            .iter()
            .map(|p| (folder.path.join(p.path()), p.svg.clone())),
    );
    files
}

/// A notebook page.
struct Page {
    experiment: String,
    /// `None` where the experiment has none.
    path: Option<PathBuf>,
    /// From the page to the root of the repository.
    up: &'static str,
}

/// The pages of all experiments, in order of name.
fn pages(root: &Path) -> Result<Vec<Page>> {
    let mut pages = Vec::new();
    for (place, up) in [
        ("experiments", "../../"),
        ("experiments/peers", "../../../"),
    ] {
        let place = root.join(place);
        let entries = fs::read_dir(&place).with_context(|| place.display().to_string())?;
        for entry in entries {
            let entry = entry.with_context(|| place.display().to_string())?;
            let experiment = entry.file_name().to_string_lossy().into_owned();
            if experiment.starts_with("exp-") {
                let path = entry.path().join("README.md");
                pages.push(Page {
                    experiment,
                    path: path.is_file().then_some(path),
                    up,
                });
            }
        }
    }
    ensure!(
        !pages.is_empty(),
        "{}: no experiments there",
        root.display()
    );
    pages.sort_by(|a, b| a.experiment.cmp(&b.experiment));
    Ok(pages)
}

/// Folders of figures that were published and not measured with this program.
fn published(results: &Path) -> Result<Vec<Folder>> {
    let mut folders = Vec::new();
    for name in lab::machines()? {
        let folder = Folder::open(&results.join(name))?;
        if is_published(&folder) {
            folders.push(folder);
        }
    }
    Ok(folders)
}

fn is_published(folder: &Folder) -> bool {
    !folder.runs.is_empty() && folder.runs.iter().all(|r| r.meta.commit == "published")
}
