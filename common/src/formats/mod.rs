//! Block formats: what is stored, byte by byte. One file a format; pack and unpack in plain Rust.
