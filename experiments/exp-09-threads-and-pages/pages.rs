//! L26: rows of the embedding from a mapped file, next to a repacked copy of its weights in memory.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use common::formats::Format;
use common::lab::{Experiment, Metric, Row, Stat};
use common::runtime::gguf::Gguf;
use common::runtime::memory::PageFaults;
use common::runtime::model::Options;
use common::runtime::pool::Pool;
use rand::RngExt;
use shared::weights::Weights;

/// Tokens looked up in a sample.
const TOKENS: usize = 32;

const TABLE: &str = "token_embd.weight";

/// Faults a token, minor and major, of each sample.
type Faults = Vec<[f64; 2]>;

pub fn embedding(exp: &mut Experiment) -> Result<()> {
    let pool = Pool::new(exp.all_threads())?;
    let (name, weights) = crate::weights(exp, Format::Pq2_0)?;
    let folder = tempfile::tempdir().context("a folder for a model file")?;
    let path = match &weights {
        Weights::File(_, path) => path.clone(),
        Weights::Random(synthetic) => {
            exp.progress(format!("{name}: writing a file"));
            let path = folder.path().join("model.gguf");
            synthetic.write(&path, &pool, |_| {})?;
            path
        }
    };
    exp.progress(format!("{name}: loading"));
    let model = Weights::open(&path)?.load(&Options::default(), &pool)?;
    let width = model.hyper().embedding;
    let rng = RefCell::new(exp.rng("tokens"));
    let draw = || -> Vec<usize> {
        let rng = &mut *rng.borrow_mut();
        (0..TOKENS)
            .map(|_| rng.random_range(0..model.vocabulary()))
            .collect()
    };
    let row = RefCell::new(vec![0f32; width]);
    let faults: [RefCell<Faults>; 3] = Default::default();
    let timed = |which: usize, look_up: &dyn Fn(usize, &mut [f32]) -> Result<()>| {
        let tokens = draw();
        let before = PageFaults::now();
        let start = Instant::now();
        for token in tokens {
            look_up(token, &mut row.borrow_mut())?;
            std::hint::black_box(&row);
        }
        let time = start.elapsed();
        if let (Some(before), Some(now)) = (before, PageFaults::now()) {
            let since = now.since(before);
            let each = [since.minor, since.major].map(|n| n as f64 / TOKENS as f64);
            faults[which].borrow_mut().push(each);
        }
        Ok(time)
    };
    let mapped = |which| -> Result<Duration> {
        // A new mapping: its pages are not in this process's tables, as after the system took them back.
        let gguf = Gguf::open(&path)?;
        let tensor = gguf.tensor(TABLE)?;
        let bytes = tensor.format.row_bytes(width)?;
        let data = gguf.data(tensor);
        timed(which, &|token, row| {
            tensor
                .format
                .dequantize(&data[token * bytes..][..bytes], row)
        })
    };
    let mut evicts = evict(&path);
    exp.progress(format!("{name}: embedding"));
    let mut race = exp.race();
    race.add_timed("read", || {
        timed(0, &|token, row| model.embedding_row(token as u32, row))
    });
    race.add_timed("mmap", || mapped(1));
    if evicts.is_ok() {
        race.add_timed("mmap-evicted", || {
            evict(&path).map_err(anyhow::Error::msg)?;
            mapped(2)
        });
    }
    let times = race.run()?;
    drop(race);

    let threads = 1;
    let line = |variant: &str| {
        let params = [("model", name.as_str()), ("part", "embedding")];
        Row::new(variant, "")
            .claim("L26")
            .threads(threads)
            .params(params)
    };
    let mut counts = [[0.0; 2]; 3];
    for (i, variant) in ["read", "mmap", "mmap-evicted"].into_iter().enumerate() {
        if i == 2 && evicts.is_err() {
            continue;
        }
        let each = times.rate(variant, Metric::Time, TOKENS as f64);
        exp.row(line(variant).metric(Metric::Time, each))?;
        let all = faults[i].borrow();
        let samples = &all[all.len().saturating_sub(times[variant].seconds.len())..];
        for (kind, what) in ["minor-faults", "major-faults"].into_iter().enumerate() {
            if samples.is_empty() {
                continue; // the system does not count
            }
            let stat = Stat::of(&samples.iter().map(|s| s[kind]).collect::<Vec<_>>());
            counts[i][kind] = stat.median;
            exp.row(
                line(variant)
                    .param("what", what)
                    .metric(Metric::Count, stat),
            )?;
        }
    }
    if let Ok(()) = evicts {
        // Pages that are still there are no proof that the file was evicted.
        if counts[2][1] == 0.0 {
            evicts = Err("no page came from the disk".into());
        }
    }
    if let Err(why) = &evicts {
        exp.refused("mmap-evicted", "", why);
    }
    let slower = times.speedup("read", "mmap");
    let row = line("read")
        .baseline("mmap")
        .metric(Metric::Speedup, slower);
    let key = exp.row(row)?;
    let faulted = counts[1][0] + counts[1][1] - counts[0][0] - counts[0][1];
    let cold = evicts
        .is_ok()
        .then(|| times.rate("mmap-evicted", Metric::Time, TOKENS as f64));
    let reason = format!(
        "{:.1} more page faults a token where the file is mapped, {:.1} times the time of a read copy{}",
        faulted,
        slower.median,
        cold.map_or(String::new(), |c| format!(
            "; {:.2} ms a token if the pages have left memory (the source: 21)",
            c.median
        ))
    );
    exp.verdict("L26", slower.low > 1.0 && faulted > 0.0, reason, &key)
}

/// Asks the system to forget the pages of a file that no one has mapped.
#[cfg(target_os = "linux")]
fn evict(path: &Path) -> Result<(), String> {
    use std::os::fd::AsRawFd;
    let file = std::fs::File::open(path).map_err(|e| e.to_string())?;
    // SAFETY: an open descriptor and plain numbers; no memory of this process is touched.
    let code = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    match code {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code).to_string()),
    }
}

#[cfg(not(target_os = "linux"))]
fn evict(_: &Path) -> Result<(), String> {
    Err("this system has no call for it".into())
}
