//! Facts about the machine, for `machine.json`.

use std::collections::BTreeMap;
use std::fs;
use std::thread;

use serde::{Deserialize, Serialize};
use sysinfo::System;

/// What `machine.json` holds. What a system does not tell is `None` or empty.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model, as it names itself.
    pub cpu: String,
    /// Architecture, as Rust names it (`x86_64`, `aarch64`).
    pub arch: String,
    /// Physical cores.
    pub cores: usize,
    /// Hardware threads of the whole machine.
    pub logical_cpus: usize,
    /// Threads that affinity and quota leave: what "all threads" means here.
    pub threads: usize,
    /// Cores that differ (performance and efficiency) by class; one class where they do not.
    pub core_classes: Vec<CoreClass>,
    /// Data and unified caches, by level.
    pub caches: Vec<Cache>,
    /// Instruction sets that matter to kernels, as the system names them.
    pub isa: Vec<String>,
    /// Memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Huge pages.
    pub huge_pages: HugePages,
    /// Operating system, version and kernel.
    pub os: String,
    /// Frequency governor.
    pub governor: Option<String>,
    /// Hypervisor or emulator the system reports running under.
    pub hypervisor: bool,
    /// CPUs this process may use, where it is restricted or the system tells.
    pub affinity: Option<String>,
    /// CPUs' worth of time a container allows.
    pub cpu_quota: Option<f64>,
    /// Load averages over 1, 5 and 15 minutes when the facts were gathered.
    pub load_average: Option<[f64; 3]>,
    /// Compiler, and how it was asked to compile; `None` for published figures.
    pub rustc: Option<Rustc>,
}

/// Cores of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreClass {
    /// Logical CPUs of the class.
    pub cpus: usize,
    /// What tells the classes apart: relative capacity or highest MHz.
    pub rank: Option<u64>,
}

/// One cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cache {
    /// 1 to 4.
    pub level: u32,
    /// `data` or `unified`.
    pub kind: String,
    /// Bytes.
    pub bytes: u64,
    /// Logical CPUs that share one.
    pub shared_by: usize,
}

/// Whether large pages can be had and were.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HugePages {
    /// The system's mode (`always`, `madvise`, `never`).
    pub mode: Option<String>,
    /// Whether the system backed a buffer with them when asked; `None` when nobody asked yet.
    pub given: Option<bool>,
}

/// How the program was compiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rustc {
    /// `rustc -V`.
    pub version: String,
    /// Target triple.
    pub target: String,
    /// `release` or `debug`.
    pub profile: String,
    /// RUSTFLAGS.
    pub flags: String,
}

impl Machine {
    /// Gathers the facts.
    pub fn here() -> Machine {
        // A system that sysinfo does not support tells nothing.
        let system = System::new().ok().map(|mut system| {
            system.refresh_cpu_all();
            system.refresh_memory();
            system
        });
        let cpus = system.as_ref().map(System::cpus).unwrap_or_default();
        let cpu = cpus
            .first()
            .map(|cpu| cpu.brand().trim().to_string())
            .filter(|brand| !brand.is_empty())
            .unwrap_or_else(|| "unknown CPU".into());
        let threads = available_threads();
        let logical_cpus = cpus.len().max(1);
        Machine {
            cpu,
            arch: std::env::consts::ARCH.into(),
            cores: System::physical_core_count().unwrap_or(logical_cpus),
            logical_cpus,
            threads,
            core_classes: core_classes(logical_cpus),
            caches: caches(),
            isa: isa(),
            memory_bytes: system.as_ref().map(System::total_memory),
            huge_pages: HugePages {
                mode: line("/sys/kernel/mm/transparent_hugepage/enabled").and_then(|text| {
                    let chosen = text.split_once('[')?.1.split_once(']')?.0;
                    Some(chosen.to_string())
                }),
                given: None,
            },
            os: [
                System::long_os_version().ok(),
                System::kernel_version().ok().map(|v| format!("kernel {v}")),
            ]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(", "),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            hypervisor: under_hypervisor(),
            affinity: affinity(),
            cpu_quota: cpu_quota(),
            load_average: System::load_average()
                .ok()
                .map(|load| [load.one, load.five, load.fifteen]),
            rustc: Some(Rustc {
                version: env!("TERN_RUSTC").into(),
                target: env!("TERN_TARGET").into(),
                profile: env!("TERN_PROFILE").into(),
                flags: env!("TERN_RUSTFLAGS").into(),
            }),
        }
    }

    /// Folder name: CPU model and core count, such as `intel-xeon-processor-2c`.
    pub fn slug(&self) -> String {
        slug(&self.cpu, self.cores)
    }
}

/// Threads that affinity and a container's CPU quota leave to this process.
pub fn available_threads() -> usize {
    thread::available_parallelism().map_or(1, |n| n.get())
}

fn slug(cpu: &str, cores: usize) -> String {
    // "AMD EPYC 9R14 96-Core Processor", "Intel(R) Core(TM) i7-1185G7 CPU @ 3.00GHz"
    let name = cpu.split('@').next().unwrap_or_default().to_lowercase();
    let name = name.replace("(r)", " ").replace("(tm)", " ");
    let words = name
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty() && *word != "cpu");
    let mut slug: String = words.collect::<Vec<_>>().join("-");
    slug.truncate(60);
    format!("{}-{cores}c", slug.trim_matches('-'))
}

/// A machine's name as given by a user: one plain path component.
///
/// # Errors
/// Text for the command line.
pub fn checked_name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 80 || name.starts_with('.') || !name.chars().all(plain) {
        return Err("expected up to 80 of letters, digits, '-', '_' and '.'".into());
    }
    Ok(name.into())
}

/// Running under an emulator of another architecture, whose timings mean nothing.
pub(super) fn emulated() -> bool {
    // Linux 6.1 and later tell the kernel's own architecture, which user-mode emulation passes on.
    line("/proc/sys/kernel/arch").is_some_and(|arch| arch != std::env::consts::ARCH)
}

/// First line of a small system file.
fn line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_string())
}

fn number(path: &str) -> Option<u64> {
    line(path)?.parse().ok()
}

/// Groups CPUs by what their system says of their strength (Linux; one class elsewhere).
fn core_classes(logical_cpus: usize) -> Vec<CoreClass> {
    let rank = |cpu: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}");
        number(&format!("{folder}/cpu_capacity"))
            .or_else(|| number(&format!("{folder}/cpufreq/cpuinfo_max_freq")).map(|khz| khz / 1000))
    };
    let mut classes: BTreeMap<Option<u64>, usize> = BTreeMap::new();
    for cpu in 0..logical_cpus {
        *classes.entry(rank(cpu)).or_default() += 1;
    }
    let strongest_first = classes.into_iter().rev();
    strongest_first
        .map(|(rank, cpus)| CoreClass { cpus, rank })
        .collect()
}

fn caches() -> Vec<Cache> {
    let from_system: Vec<Cache> = (0..8)
        .filter_map(|index| {
            let file = |name: &str| {
                line(&format!(
                    "/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"
                ))
            };
            let kind = file("type")?.to_lowercase();
            if kind == "instruction" {
                return None;
            }
            let size = file("size")?;
            let (digits, scale) = match size.strip_suffix('K') {
                Some(digits) => (digits, 1 << 10),
                None => (size.strip_suffix('M')?, 1 << 20),
            };
            Some(Cache {
                level: file("level")?.parse().ok()?,
                kind,
                bytes: digits.parse::<u64>().ok()? * scale,
                shared_by: file("shared_cpu_list").map_or(1, |list| count_cpus(&list)),
            })
        })
        .collect();
    if from_system.is_empty() {
        caches_from_cpuid()
    } else {
        from_system
    }
}

#[cfg(target_arch = "x86_64")]
fn caches_from_cpuid() -> Vec<Cache> {
    use raw_cpuid::{CacheType, CpuId};
    let parameters = CpuId::new().get_cache_parameters();
    parameters
        .into_iter()
        .flatten()
        .filter_map(|cache| {
            let kind = match cache.cache_type() {
                CacheType::Data => "data",
                CacheType::Unified => "unified",
                _ => return None,
            };
            let lines = cache.associativity() * cache.physical_line_partitions() * cache.sets();
            Some(Cache {
                level: u32::from(cache.level()),
                kind: kind.into(),
                bytes: (lines * cache.coherency_line_size()) as u64,
                shared_by: cache.max_cores_for_cache(),
            })
        })
        .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn caches_from_cpuid() -> Vec<Cache> {
    Vec::new()
}

/// CPUs in a list such as `0-3,8`.
fn count_cpus(list: &str) -> usize {
    list.split(',')
        .map(|range| match range.split_once('-') {
            Some((from, to)) => match (from.parse::<usize>(), to.parse::<usize>()) {
                (Ok(from), Ok(to)) if to >= from => to - from + 1,
                _ => 0,
            },
            None => usize::from(range.parse::<usize>().is_ok()),
        })
        .sum()
}

fn isa() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    macro_rules! detect {
        ($detected:ident: $($name:tt),*) => {
            $(if std::arch::$detected!($name) { found.push($name.into()); })*
        };
    }
    #[cfg(target_arch = "x86_64")]
    detect!(is_x86_feature_detected:
        "sse4.1", "ssse3", "avx", "avx2", "fma", "f16c", "bmi2", "avxvnni", "avx512f", "avx512bw",
        "avx512vl", "avx512dq", "avx512vnni", "avx512vbmi", "avx512vbmi2", "avx512bitalg",
        "avx512bf16", "avx512fp16", "gfni", "avxvnniint8");
    #[cfg(target_arch = "aarch64")]
    detect!(is_aarch64_feature_detected:
        "neon", "dotprod", "i8mm", "fp16", "bf16", "sve", "sve2");
    found.sort();
    found
}

fn under_hypervisor() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let features = raw_cpuid::CpuId::new().get_feature_info();
        features.is_some_and(|f| f.has_hypervisor())
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// The CPUs this process may run on, as Linux lists them.
fn affinity() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status
        .lines()
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    Some(list.trim().to_string())
}

/// The quota of this process's control group, in CPUs: version 2 first, then version 1.
fn cpu_quota() -> Option<f64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().find_map(|entry| {
        let mut parts = entry.splitn(3, ':');
        let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let (quota, period): (f64, f64) = if id == "0" && controllers.is_empty() {
            let text = line(&format!("/sys/fs/cgroup{path}/cpu.max"))
                .or_else(|| line("/sys/fs/cgroup/cpu.max"))?;
            let (quota, period) = text.split_once(' ')?;
            (quota.parse().ok()?, period.parse().ok()?)
        } else if controllers.split(',').any(|c| c == "cpu") {
            let file = |name: &str| {
                line(&format!("/sys/fs/cgroup/{controllers}{path}/{name}"))
                    .or_else(|| line(&format!("/sys/fs/cgroup/{controllers}/{name}")))
            };
            (
                file("cpu.cfs_quota_us")?.parse().ok()?,
                file("cpu.cfs_period_us")?.parse().ok()?,
            )
        } else {
            return None;
        };
        (quota > 0.0 && period > 0.0).then_some(quota / period)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs() {
        for (cpu, cores, expected) in [
            ("Intel(R) Xeon(R) Processor", 2, "intel-xeon-processor-2c"),
            (
                "Intel(R) Core(TM) i7-1185G7 CPU @ 3.00GHz",
                4,
                "intel-core-i7-1185g7-4c",
            ),
            (
                "AMD EPYC 9R14 96-Core Processor",
                96,
                "amd-epyc-9r14-96-core-processor-96c",
            ),
            ("Apple M2", 8, "apple-m2-8c"),
        ] {
            assert_eq!(slug(cpu, cores), expected);
            assert!(checked_name(expected).is_ok());
        }
        assert!(checked_name(&slug("\u{1f600}/../x", 1)).is_ok());
    }

    #[test]
    fn the_facts_of_this_machine_hang_together_and_read_back() {
        let here = Machine::here();
        assert!(here.threads >= 1 && here.cores >= 1 && here.memory_bytes > Some(1 << 20));
        let classed: usize = here.core_classes.iter().map(|c| c.cpus).sum();
        assert_eq!(classed, here.logical_cpus);
        let text = serde_json::to_string(&here).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), here);
    }

    #[test]
    fn cpu_lists() {
        assert_eq!(count_cpus("0-3,8"), 5);
        assert_eq!(count_cpus("0"), 1);
        assert_eq!(count_cpus("3-1,x"), 0);
    }
}
