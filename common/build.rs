//! Records which compiler and settings this library was built with, for `results/*/machine.json`.

use std::env;
use std::process::Command;

fn main() {
    // Cargo runs this again by itself when the compiler, the target or the profile changes.
    println!("cargo:rerun-if-changed=build.rs");
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc)
        .arg("-V")
        .output()
        .ok()
        .and_then(|out| String::from_utf8(out.stdout).ok())
        .map_or_else(|| "unknown".into(), |text| text.trim().to_string());
    println!("cargo:rustc-env=TERN_RUSTC={version}");
    for (ours, cargos) in [
        ("TERN_TARGET", "TARGET"),
        ("TERN_PROFILE", "PROFILE"),
        ("TERN_RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"),
    ] {
        let value = env::var(cargos).unwrap_or_default().replace('\x1f', " ");
        println!("cargo:rustc-env={ours}={value}");
    }
}
