//! The `tern` tool.

fn main() {}
